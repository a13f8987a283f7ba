//! The programs' entry points, one for each hook.

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr, classifier},
    programs::{SockAddrContext, SockContext, TcContext},
};

use crate::{
    context::{ALLOW, Sock4, Sock6},
    forward, guard, origin, socket,
};

#[cgroup_sock_addr(connect4)]
fn connect4(ctx: SockAddrContext) -> i32 {
    socket::connect(&Sock4::new(&ctx))
}

#[cgroup_sock_addr(connect6)]
fn connect6(ctx: SockAddrContext) -> i32 {
    socket::connect(&Sock6::new(&ctx))
}

#[cgroup_sock_addr(sendmsg4)]
fn sendmsg4(ctx: SockAddrContext) -> i32 {
    socket::send(&Sock4::new(&ctx))
}

#[cgroup_sock_addr(sendmsg6)]
fn sendmsg6(ctx: SockAddrContext) -> i32 {
    socket::send(&Sock6::new(&ctx))
}

#[cgroup_sock_addr(recvmsg4)]
fn recvmsg4(ctx: SockAddrContext) -> i32 {
    socket::receive(&Sock4::new(&ctx));
    ALLOW
}

#[cgroup_sock_addr(recvmsg6)]
fn recvmsg6(ctx: SockAddrContext) -> i32 {
    socket::receive(&Sock6::new(&ctx));
    ALLOW
}

#[cgroup_sock_addr(getpeername4)]
fn getpeername4(ctx: SockAddrContext) -> i32 {
    socket::getpeername(&Sock4::new(&ctx));
    ALLOW
}

#[cgroup_sock_addr(getpeername6)]
fn getpeername6(ctx: SockAddrContext) -> i32 {
    socket::getpeername(&Sock6::new(&ctx));
    ALLOW
}

#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    origin::release(&ctx);
    ALLOW
}

#[classifier]
fn guard(ctx: TcContext) -> i32 {
    guard::filter(&ctx)
}

// `in` is a keyword of Rust.
#[classifier]
fn r#in(ctx: TcContext) -> i32 {
    forward::arrive(&ctx)
}

#[classifier]
fn out(ctx: TcContext) -> i32 {
    forward::leave(&ctx)
}
