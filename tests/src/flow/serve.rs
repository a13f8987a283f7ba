//! The server.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr},
    os::fd::AsFd as _,
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use rustls::ServerConfig;
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, UnixListener},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use super::{CHUNK, FLOOD, LITTLE, STALL};
use crate::kubelet::pattern;

const BACKLOG: i32 = 1024;

/// Serves two ports until the process is killed; a Unix socket appears once both listen.
///
/// # Errors
///
/// When it can't listen.
pub fn serve(plain: u16, secure: u16, tls: Arc<ServerConfig>, ready: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_io()
        .build()?;
    runtime.block_on(async {
        let mut ports = JoinSet::new();
        ports.spawn(accept(listen(plain)?, None));
        ports.spawn(accept(listen(secure)?, Some(TlsAcceptor::from(tls))));
        let _ready = UnixListener::bind(ready)
            .with_context(|| format!("cannot listen on {}", ready.display()))?;
        match ports.join_next().await {
            Some(ended) => Ok(ended??),
            None => Ok(()),
        }
    })
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>) -> io::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted?;
                stream.set_nodelay(true)?;
                let tls = tls.clone();
                connections.spawn(async move {
                    let socket = Socket::from(stream.as_fd().try_clone_to_owned()?);
                    match tls {
                        None => act(stream, &socket).await,
                        Some(tls) => act(tls.accept(stream).await?, &socket).await,
                    }
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn act(mut stream: impl AsyncRead + AsyncWrite + Unpin, socket: &Socket) -> io::Result<()> {
    let what = stream.read_u8().await?;
    if what == STALL {
        socket.set_send_buffer_size(LITTLE)?;
    }
    if what == FLOOD || what == STALL {
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
