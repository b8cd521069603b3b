//! Cuts the connections of a UCX worker.
//!
//! Over its tcp, UCX ends what it has begun when the connection beneath ends, but offers no call for that to an
//! endpoint without failure reports. Its sockets are found beneath the worker's descriptor, which is an epoll instance:
//! the kernel lists what each one watches.
//!
//! UCX 1.13 asserts that no answer arrives after it has failed to send. So a connection that the peer has closed is
//! emptied first, and one that the peer may still use is kept open behind UCX's back (see `lingering`).
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    MsgFlags, Shutdown, SockType, SockaddrStorage, getpeername, getsockopt, recv, shutdown, sockopt,
};

/// Epoll instances above a socket: the worker's and that of its interface. The kernel nests no more than five.
const DEPTH_MAX: u32 = 5;
/// Bytes of a call that discards what has arrived.
const DISCARDED_AT_ONCE: usize = 64 << 10;

/// The connections beneath the epoll instance `epoll`; none where /proc cannot be read.
pub(crate) fn connections(epoll: RawFd) -> Vec<RawFd> {
    let mut found = Vec::new();
    let mut level = vec![epoll];
    for _ in 0..DEPTH_MAX {
        let watched: Vec<RawFd> = level.into_iter().flat_map(watched).collect();
        let (connected, others): (Vec<RawFd>, Vec<RawFd>) = watched.into_iter().partition(|&fd| is_connection(fd));
        found.extend(connected);
        level = others;
    }
    found
}

/// Makes a connection reach end of file once UCX has read what has arrived. The returned descriptor keeps the
/// connection open for the peer, unless the peer has closed it.
pub(crate) fn cut(connection: RawFd) -> Option<OwnedFd> {
    // SAFETY: UCX keeps it open while the worker is not driven.
    let borrowed = unsafe { BorrowedFd::borrow_raw(connection) };
    let kept = if is_closed_by_peer(borrowed) {
        // Nothing follows what has arrived.
        let mut bytes = vec![0; DISCARDED_AT_ONCE];
        while matches!(recv(connection, &mut bytes, MsgFlags::MSG_DONTWAIT), Ok(1..) | Err(Errno::EINTR)) {}
        None
    } else {
        // Without one more descriptor, the peer's UCX learns of the end at once.
        borrowed.try_clone_to_owned().ok()
    };
    // It may have ended already.
    let _ = shutdown(connection, Shutdown::Read);
    kept
}

/// Whether the peer's end, or a reset, is in the kernel already, behind everything that the peer has sent.
fn is_closed_by_peer(connection: BorrowedFd<'_>) -> bool {
    let mut fd = libc::pollfd { fd: connection.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one entry, which outlives the call.
    let ready = unsafe { libc::poll(&mut fd, 1, 0) };
    ready > 0 && fd.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

/// What an epoll instance watches; nothing if `fd` is something else.
fn watched(fd: RawFd) -> Vec<RawFd> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    watched_in(&text).collect()
}

/// The descriptors that an epoll instance watches, in the kernel's text about it.
fn watched_in(text: &str) -> impl Iterator<Item = RawFd> {
    text.lines().filter_map(|line| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse().ok())
}

/// Whether it is a connected stream.
fn is_connection(fd: RawFd) -> bool {
    // SAFETY: UCX keeps it open while the worker is not driven.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    getsockopt(&borrowed, sockopt::SockType) == Ok(SockType::Stream) && getpeername::<SockaddrStorage>(fd).is_ok()
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

    use super::*;

    /// A connected stream and its peer, and an epoll instance with the stream beneath, two levels down.
    struct Watched {
        stream: TcpStream,
        peer: TcpStream,
        listener: TcpListener,
        outer: Epoll,
        _inner: Epoll,
    }

    fn watched_stream() -> Watched {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("dial");
        let peer = listener.accept().expect("accept").0;
        let [outer, inner] = [0; 2].map(|_| Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("epoll"));
        let event = EpollEvent::new(EpollFlags::EPOLLIN, 0);
        inner.add(stream.as_fd(), event).expect("added");
        outer.add(inner.0.as_fd(), event).expect("added");
        // Neither is a connection.
        outer.add(listener.as_fd(), event).expect("added");
        outer.add(UdpSocket::bind("127.0.0.1:0").expect("bind").as_fd(), event).expect("added");
        Watched { stream, peer, listener, outer, _inner: inner }
    }

    #[test]
    fn a_connection_that_is_cut_ends_here_and_stays_open_for_its_peer() {
        let Watched { mut stream, mut peer, listener, outer, _inner } = watched_stream();
        peer.write_all(b"early").expect("written");
        assert_eq!(connections(outer.0.as_raw_fd()), [stream.as_raw_fd()]);
        let kept = cut(stream.as_raw_fd()).expect("kept open");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("at its end");
        assert_eq!(text, "early");
        drop(stream);
        assert_eq!(connections(outer.0.as_raw_fd()).len(), 0);
        peer.set_nonblocking(true).expect("set");
        assert_eq!(peer.read(&mut [0; 8]).expect_err("open").kind(), ErrorKind::WouldBlock);
        peer.write_all(b"late").expect("open");
        drop((kept, listener));
    }

    #[test]
    fn a_connection_that_its_peer_has_closed_is_emptied() {
        let Watched { mut stream, mut peer, listener, outer, _inner } = watched_stream();
        peer.write_all(&[1; 100_000]).expect("written");
        drop(peer);
        let found = connections(outer.0.as_raw_fd());
        assert_eq!(found, [stream.as_raw_fd()]);
        drop(listener);
        assert!(cut(found[0]).is_none(), "nobody is there");
        assert_eq!(stream.read(&mut [0; 8]).expect("at its end"), 0);
    }
}
