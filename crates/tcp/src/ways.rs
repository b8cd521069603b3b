//! The kernel's send and receive interfaces: which are available to this process, which it uses, and why not the
//! others.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, RawFd};

use crate::pipe::Pipe;
use crate::sys;

/// One way of the kernel to send or to receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// Its name in the kernel's documentation.
    pub name: &'static str,
    /// Whether this process may use it.
    pub possible: bool,
    /// Whether lanes use it here.
    pub used: bool,
    /// What it is used for; why it is not used; or what is missing.
    pub reason: String,
    /// What to change, where something is missing.
    pub fix: Option<String>,
}

/// All ways beside send and recv, each tried on a socket of this process. None is needed: lanes fall back to those two.
pub fn ways() -> Vec<Way> {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let option = |option: i32, value: i32| {
        let fd: RawFd = socket.as_ref().map_err(|error| io::Error::from(error.kind()))?.as_raw_fd();
        sys::set_int(fd, libc::SOL_SOCKET, option, value)
    };
    vec![
        by_reference(Pipe::new().is_some()),
        zero_copy(option(libc::SO_ZEROCOPY, 1)),
        io_uring(sys::io_uring()),
        busy_poll(option(libc::SO_BUSY_POLL, 1)),
    ]
}

impl Way {
    /// A way that is available, with the reason why it is used or not.
    fn possible(name: &'static str, used: bool, reason: &str) -> Way {
        Way { name, possible: true, used, reason: reason.to_owned(), fix: None }
    }

    fn missing(name: &'static str, reason: String, fix: &str) -> Way {
        Way { name, possible: false, used: false, reason, fix: Some(fix.to_owned()) }
    }
}

fn by_reference(pipe: bool) -> Way {
    const NAME: &str = "vmsplice, splice";
    if pipe {
        return Way::possible(NAME, true, "payloads of 64 KiB and more are sent by reference, not copied");
    }
    let reason = "the system grants no pipe of 64 KiB or more: payloads are copied".to_owned();
    Way::missing(NAME, reason, "sysctl -w fs.pipe-user-pages-soft=0, or ulimit -n with room for two descriptors a lane")
}

fn zero_copy(tried: io::Result<()>) -> Way {
    const NAME: &str = "MSG_ZEROCOPY";
    match tried {
        Ok(()) => Way::possible(
            NAME,
            false,
            "splice sends by reference as well, and without a completion to be fetched for each call; within one machine \
             the kernel copies all the same",
        ),
        Err(error) => {
            Way::missing(NAME, format!("SO_ZEROCOPY is refused: {error}"), "Linux 4.14; nothing is lost without it")
        }
    }
}

fn io_uring(tried: io::Result<()>) -> Way {
    const NAME: &str = "io_uring";
    let error = match tried {
        Ok(()) => {
            let reason = "sends and receives cost as much CPU time per byte as send and recv; with registered buffers \
                          and without copies, half as much again";
            return Way::possible(NAME, false, reason);
        }
        Err(error) => error,
    };
    match error.raw_os_error() {
        Some(libc::ENOSYS) => Way::missing(
            NAME,
            "this kernel has none, or a seccomp filter hides it".to_owned(),
            "Linux 5.1; nothing is lost without it",
        ),
        Some(libc::EPERM | libc::EACCES) => Way::missing(
            NAME,
            "it is forbidden, by kernel.io_uring_disabled or by a seccomp filter as in containers".to_owned(),
            "sysctl -w kernel.io_uring_disabled=0 and a seccomp profile that allows it; nothing is lost without it",
        ),
        _ => Way::missing(NAME, format!("io_uring_setup: {error}"), "nothing is lost without it"),
    }
}

fn busy_poll(tried: io::Result<()>) -> Way {
    const NAME: &str = "SO_BUSY_POLL";
    match tried {
        Ok(()) => Way::possible(
            NAME,
            false,
            "recv never blocks on a socket: threads poll all of them for 100 us before they sleep, where cores are \
             free; for epoll the system decides (net.core.busy_poll)",
        ),
        Err(error) => Way::missing(
            NAME,
            format!("refused to this process: {error}"),
            "CAP_NET_ADMIN, or sysctl -w net.core.busy_poll=50, which also holds for epoll",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: i32) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn what_is_missing_has_a_reason_and_a_fix() {
        let missing = [
            by_reference(false),
            zero_copy(refused(libc::ENOPROTOOPT)),
            io_uring(refused(libc::ENOSYS)),
            io_uring(refused(libc::EPERM)),
            io_uring(refused(libc::ENOMEM)),
            busy_poll(refused(libc::EPERM)),
        ];
        for way in &missing {
            assert!(!way.possible && !way.used && !way.reason.is_empty() && way.fix.is_some(), "{way:?}");
        }
        assert!(missing[3].reason.contains("seccomp"), "{missing:?}");
        assert!(missing[5].reason.contains("not permitted"), "{missing:?}");
    }

    #[test]
    fn what_is_possible_says_why_it_is_or_is_not_used() {
        let possible = [by_reference(true), zero_copy(Ok(())), io_uring(Ok(())), busy_poll(Ok(()))];
        assert!(possible.iter().all(|way| way.possible && !way.reason.is_empty() && way.fix.is_none()));
        assert_eq!(possible.map(|way| way.used), [true, false, false, false]);
    }

    #[test]
    fn every_way_is_tried_on_this_machine() {
        let found = ways();
        assert_eq!(
            found.iter().map(|way| way.name).collect::<Vec<_>>(),
            ["vmsplice, splice", "MSG_ZEROCOPY", "io_uring", "SO_BUSY_POLL"]
        );
        assert!(found.iter().all(|way| way.possible != way.fix.is_some()), "{found:?}");
    }
}
