//! The flood and echo server.

use std::{io, os::fd::AsFd as _, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use rustls::ServerConfig;
use socket2::Socket;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixListener},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use super::{CHUNK, FLOOD, SMALL_BUFFER, STALL};
use crate::{
    fake_kubelet::pattern,
    server::{accept, listen},
};

/// Serves both ports until the process is killed. Creates the Unix socket `ready` once it is listening on
/// both.
pub fn serve(plain: u16, secure: u16, tls: Arc<ServerConfig>, ready: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_io()
        .build()?;
    runtime.block_on(async {
        let tls = TlsAcceptor::from(tls);
        let mut ports = JoinSet::new();
        ports.spawn(accept(listen(plain)?, |stream| async move {
            let socket = prepare(&stream)?;
            serve_stream(stream, &socket).await
        }));
        ports.spawn(accept(listen(secure)?, move |stream| {
            let tls = tls.clone();
            async move {
                let socket = prepare(&stream)?;
                serve_stream(tls.accept(stream).await?, &socket).await
            }
        }));
        let _ready = UnixListener::bind(ready)
            .with_context(|| format!("cannot listen on {}", ready.display()))?;
        match ports.join_next().await {
            Some(ended) => Ok(ended??),
            None => Ok(()),
        }
    })
}

/// Disables Nagle's algorithm for a stream, and returns a handle to its socket with which the buffer sizes
/// can be set.
fn prepare(stream: &TcpStream) -> io::Result<Socket> {
    stream.set_nodelay(true)?;
    Ok(Socket::from(stream.as_fd().try_clone_to_owned()?))
}

async fn serve_stream(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    socket: &Socket,
) -> io::Result<()> {
    let mode = stream.read_u8().await?;
    if mode == STALL {
        socket.set_send_buffer_size(SMALL_BUFFER)?;
    }
    if mode == FLOOD || mode == STALL {
        let pattern = pattern();
        loop {
            stream.write_all(&pattern).await?;
        }
    }
    let mut buffer = vec![0; CHUNK];
    loop {
        let length = stream.read(&mut buffer).await?;
        if length == 0 {
            return stream.shutdown().await;
        }
        stream.write_all(&buffer[..length]).await?;
        stream.flush().await?;
    }
}
