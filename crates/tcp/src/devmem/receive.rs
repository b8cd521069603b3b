//! Memory bound to receive queues, and receiving into it.
#![allow(unsafe_code)] // recvmsg and setsockopt with structures of the kernel's

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd};

use crossrail_types::{Error, ErrorKind, Result};
use libc::{c_void, iovec, socklen_t};

use super::message::{Expected, Fragment, fragments, ranges, room};
use super::netlink::{Family, number};
use super::{BIND_RX, DMABUF_ID, NETDEV, binding};

/// Flag of recvmsg: bytes may stay in device memory.
const MSG_SOCK_DEVMEM: i32 = 0x200_0000;
/// Socket option: fragments are returned.
const SO_DEVMEM_DONTNEED: i32 = 80;
/// Ranges of tokens that one call returns, and fragments that it frees.
const RANGES: usize = 128;
const FREED: u32 = 1024;
/// Fragments, and bytes outside device memory, that one receive takes.
const FRAGMENTS: usize = 128;
const HOST_BYTES: usize = 64 * 1024;

/// A dmabuf that receive queues of a network device write into. They stop when it is dropped.
#[derive(Debug)]
pub struct Binding {
    /// The kernel ends the binding with this socket.
    _netdev: Family,
    id: u32,
    size: u64,
}

impl Binding {
    /// Binds the `size` bytes of `dmabuf` to `queues` of the device. The queues restart, so connections on them stall for
    /// a moment; steering connections to them, and all others away, is the caller's part (`ethtool -N`, `ethtool -X`).
    ///
    /// # Errors
    /// `Io` with the kernel's words if it refuses; [`super::probe`] tells why it would.
    pub fn new(ifindex: u32, queues: &[u32], dmabuf: BorrowedFd<'_>, size: u64) -> Result<Binding> {
        let fail = |call: &str, refused: super::netlink::Refused| {
            let error = Error::new(ErrorKind::Io, "bind device memory", format!("{call}: {refused}"));
            error.with_io(&io::Error::from_raw_os_error(refused.errno))
        };
        let netdev = Family::open(NETDEV).map_err(|refused| fail("netlink family netdev", refused))?;
        let answers = netdev
            .ask(BIND_RX, false, &binding(ifindex, queues, dmabuf.as_raw_fd()))
            .map_err(|refused| fail("bind-rx", refused))?;
        let id = answers.iter().find_map(|answer| number(answer, DMABUF_ID));
        let id =
            id.ok_or_else(|| Error::new(ErrorKind::Io, "bind device memory", "bind-rx: no number in the answer"))?;
        Ok(Binding { _netdev: netdev, id, size })
    }
}

/// Receives on connections whose packets go to the queues of a [`Binding`].
#[derive(Debug)]
pub struct Receiver<'a> {
    binding: &'a Binding,
    control: Vec<u64>,
    host: Vec<u8>,
}

impl<'a> Receiver<'a> {
    /// A receiver of connections that go to the queues of `binding`.
    pub fn new(binding: &'a Binding) -> Receiver<'a> {
        Receiver { binding, control: vec![0; room(FRAGMENTS) / size_of::<u64>()], host: vec![0; HOST_BYTES] }
    }

    /// The next bytes of `stream`: where they lie, in the stream's order, and those that packets brought unsplit. Empty
    /// at the end of the stream. Fragments in device memory belong to the caller until [`Receiver::give_back`].
    ///
    /// # Errors
    /// `Io` if receiving fails, `WouldBlock` of a non-blocking stream included, or if what the kernel says does not fit
    /// together: the connection can't be used further, because the place of some bytes is unknown.
    pub fn receive(&mut self, stream: &TcpStream) -> Result<(Vec<Fragment>, &[u8])> {
        let mut piece = iovec { iov_base: self.host.as_mut_ptr().cast(), iov_len: self.host.len() };
        // SAFETY: msghdr is plain data, for which all zeros is valid and means "none".
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &mut piece;
        message.msg_iovlen = 1;
        message.msg_control = self.control.as_mut_ptr().cast();
        message.msg_controllen = room(FRAGMENTS) as _;
        // SAFETY: the buffer and the control messages are this receiver's and live through the call.
        let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, MSG_SOCK_DEVMEM) };
        let Ok(received) = usize::try_from(received) else {
            return Err(Error::io("receive", "recvmsg", &io::Error::last_os_error()));
        };
        let fail = |what: String| Error::new(ErrorKind::Io, "receive", format!("device memory: {what}"));
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(fail(format!("more than {FRAGMENTS} fragments in one receive")));
        }
        let bytes: Vec<u8> = self.control.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let length = (message.msg_controllen as usize).min(bytes.len());
        let Binding { id, size, .. } = *self.binding;
        let expected = Expected { dmabuf: id, size, received, buffer: self.host.len() };
        let found = fragments(&bytes[..length], expected).map_err(fail)?;
        let host = found.iter().map(|one| if let Fragment::Host { len } = one { *len as usize } else { 0 }).sum();
        Ok((found, &self.host[..host]))
    }

    /// Returns `fragments` of `stream` to the kernel, which lets the NIC write there again: everything is copied.
    ///
    /// # Errors
    /// `Io` if the kernel refuses some of them; they stay lent until the connection is closed.
    pub fn give_back(&self, stream: &TcpStream, fragments: &[Fragment]) -> Result<()> {
        let tokens = fragments.iter().filter_map(|fragment| match fragment {
            Fragment::Device { token, .. } => Some(*token),
            Fragment::Host { .. } => None,
        });
        let ranges = ranges(tokens.collect());
        // A call frees so many fragments at most, whatever the ranges are.
        let pieces: Vec<[u32; 2]> = ranges
            .into_iter()
            .flat_map(|(first, count)| {
                (0..count).step_by(FREED as usize).map(move |at| [first.wrapping_add(at), FREED.min(count - at)])
            })
            .collect();
        let mut rest = &pieces[..];
        while !rest.is_empty() {
            let mut freed = 0;
            let fits = |piece: &&[u32; 2]| {
                freed += piece[1];
                freed <= FREED
            };
            let count = rest.iter().take(RANGES).take_while(fits).count();
            let (now, later) = rest.split_at(count);
            let wanted: u32 = now.iter().map(|piece| piece[1]).sum();
            let bytes = size_of_val(now) as socklen_t;
            let (fd, value) = (stream.as_raw_fd(), now.as_ptr().cast::<c_void>());
            // SAFETY: `value` points to `bytes` bytes: pairs of u32, as struct dmabuf_token.
            let result = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_DEVMEM_DONTNEED, value, bytes) };
            if result < 0 {
                return Err(Error::io("receive", "SO_DEVMEM_DONTNEED", &io::Error::last_os_error()));
            }
            if result.cast_unsigned() != wanted {
                let detail = format!("device memory: the kernel took back {result} of {wanted} fragments");
                return Err(Error::new(ErrorKind::Io, "receive", detail));
            }
            rest = later;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn memory_that_is_no_dmabuf_is_not_bound() {
        let error = Binding::new(1, &[0], File::open("/dev/null").unwrap().as_fd(), 4096).unwrap_err();
        assert!(error.to_string().contains("netdev") || error.to_string().contains("bind-rx"), "{error}");
    }

    #[test]
    fn what_arrives_over_loopback_is_not_in_device_memory() {
        let Ok(netdev) = Family::open(NETDEV) else { return };
        let binding = Binding { _netdev: netdev, id: 1, size: 4096 };
        let mut receiver = Receiver::new(&binding);
        let (mut from, to) = pair();
        from.write_all(b"unsplit").unwrap();
        let (found, bytes) = receiver.receive(&to).unwrap();
        assert_eq!((found, bytes), (vec![Fragment::Host { len: 7 }], &b"unsplit"[..]));
        drop(from);
        assert_eq!(receiver.receive(&to).unwrap(), (vec![], &b""[..]));
    }

    #[test]
    fn fragments_that_were_not_received_are_not_taken_back() {
        let Ok(netdev) = Family::open(NETDEV) else { return };
        let binding = Binding { _netdev: netdev, id: 1, size: 4096 };
        let (_from, to) = pair();
        let receiver = Receiver::new(&binding);
        let lent = [Fragment::Device { offset: 0, len: 1, token: 5 }, Fragment::Host { len: 3 }];
        assert!(receiver.give_back(&to, &lent).is_err());
        assert!(receiver.give_back(&to, &lent[1..]).is_ok(), "nothing to return");
    }
}
