//! Notifications of interfaces that go up or down, and of addresses that change, from rtnetlink.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crossrail_types::{Error, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
};

/// Multicast groups: link changes, and addresses of both families (RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR).
const GROUPS: u32 = 0x1 | 0x10 | 0x100;
const MESSAGE_HEAD: usize = 16;
const LINK_HEAD: usize = 16;

/// A network interface that went up or down, or was removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkChange {
    /// The interface index.
    pub index: u32,
    /// The interface name; empty if the message has none, which is rare.
    pub name: String,
    /// Whether it is administratively up and has a carrier.
    pub up: bool,
}

/// Watches the interfaces of this network namespace through rtnetlink: changes arrive within a millisecond, without
/// polling.
#[derive(Debug)]
pub struct LinkWatch {
    socket: OwnedFd,
    /// An address has been added or removed since that was last asked for.
    addresses: bool,
}

impl LinkWatch {
    /// Starts watching all interfaces of this network namespace. Requires no privileges.
    ///
    /// # Errors
    /// `Io` if a netlink socket cannot be opened.
    pub fn new() -> Result<LinkWatch> {
        let fail = |call: &'static str| move |errno: Errno| Error::io("watch links", call, &io::Error::from(errno));
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket =
            socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute).map_err(fail("socket"))?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUPS)).map_err(fail("bind"))?;
        Ok(LinkWatch { socket, addresses: false })
    }

    /// The descriptor, readable when there are changes. If it is watched edge-triggered, call [`LinkWatch::changes`] at
    /// every edge.
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// All changes since the last call, in order; never blocks. Each entry has the state at the time of the change, and
    /// an interface may appear more than once. If the kernel dropped notifications, the current state of every
    /// interface follows.
    pub fn changes(&mut self) -> Vec<LinkChange> {
        let mut changes = VecDeque::new();
        let mut buffer = vec![0u8; 32 * 1024];
        loop {
            match recv(self.fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => break,
                Ok(n) => self.addresses |= parse(&buffer[..n.min(buffer.len())], &mut changes),
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => {
                    self.addresses = true;
                    self.ask_for_all();
                }
                Err(_) => break,
            }
        }
        changes.into()
    }

    /// True if [`LinkWatch::changes`] has read of an address that was added or removed since the last call.
    pub fn take_addresses_changed(&mut self) -> bool {
        std::mem::take(&mut self.addresses)
    }

    /// Requests the state of every interface, which arrives as if each had changed.
    fn ask_for_all(&self) {
        const LEN: usize = MESSAGE_HEAD + LINK_HEAD;
        let mut request = [0u8; LEN];
        request[0..4].copy_from_slice(&(LEN as u32).to_ne_bytes());
        request[4..6].copy_from_slice(&libc::RTM_GETLINK.to_ne_bytes());
        request[6..8].copy_from_slice(&((libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16).to_ne_bytes());
        // If this fails too, later changes are still reported.
        let _ = send(self.fd(), &request, MsgFlags::MSG_DONTWAIT);
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Parses the link messages of a datagram. Whether there are any of addresses.
fn parse(mut bytes: &[u8], changes: &mut VecDeque<LinkChange>) -> bool {
    let mut addresses = false;
    while let (Some(len), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let len = len as usize;
        let Some(message) = bytes.get(MESSAGE_HEAD..len) else { return addresses };
        addresses |= kind == libc::RTM_NEWADDR || kind == libc::RTM_DELADDR;
        if kind == libc::RTM_NEWLINK || kind == libc::RTM_DELLINK {
            changes.extend(link(message, kind == libc::RTM_NEWLINK));
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    addresses
}

/// Parses a struct ifinfomsg and its attributes.
fn link(message: &[u8], exists: bool) -> Option<LinkChange> {
    let index = u32_at(message, 4)?;
    let flags = u32_at(message, 8)?;
    let wanted = (libc::IFF_UP | libc::IFF_RUNNING) as u32;
    let mut attributes = message.get(LINK_HEAD..)?;
    let mut name = String::new();
    while let (Some(len), Some(kind)) = (u16_at(attributes, 0), u16_at(attributes, 2)) {
        let len = usize::from(len);
        let Some(value) = attributes.get(4..len) else { break };
        if kind == libc::IFLA_IFNAME {
            name = String::from_utf8_lossy(value.split(|byte| *byte == 0).next().unwrap_or(&[])).into_owned();
            break;
        }
        attributes = attributes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Some(LinkChange { index, name, up: exists && flags & wanted == wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, flags: u32, name: &[u8]) -> Vec<u8> {
        let attribute = 4 + name.len() + 1;
        let len = MESSAGE_HEAD + LINK_HEAD + attribute;
        let mut bytes = vec![0; len.next_multiple_of(4)];
        bytes[0..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[20..24].copy_from_slice(&7u32.to_ne_bytes());
        bytes[24..28].copy_from_slice(&flags.to_ne_bytes());
        bytes[32..34].copy_from_slice(&(attribute as u16).to_ne_bytes());
        bytes[34..36].copy_from_slice(&libc::IFLA_IFNAME.to_ne_bytes());
        bytes[36..36 + name.len()].copy_from_slice(name);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Vec<LinkChange> {
        let mut changes = VecDeque::new();
        parse(bytes, &mut changes);
        changes.into()
    }

    #[test]
    fn up_means_configured_and_with_carrier() {
        let mut bytes = message(libc::RTM_NEWLINK, 0x41, b"eth1");
        bytes.extend(message(libc::RTM_NEWLINK, 0x01, b"eth22"));
        bytes.extend(message(libc::RTM_DELLINK, 0x41, b"eth3"));
        let seen: Vec<(String, bool)> = parsed(&bytes).into_iter().map(|change| (change.name, change.up)).collect();
        assert_eq!(seen, [("eth1".into(), true), ("eth22".into(), false), ("eth3".into(), false)]);
    }

    #[test]
    fn messages_of_addresses_are_noticed_among_others() {
        let of = |kinds: &[u16]| {
            let bytes: Vec<u8> = kinds.iter().flat_map(|kind| message(*kind, 0x41, b"eth1")).collect();
            let mut changes = VecDeque::new();
            (parse(&bytes, &mut changes), changes.len())
        };
        assert_eq!(of(&[libc::RTM_NEWLINK]), (false, 1));
        assert_eq!(of(&[libc::RTM_NEWLINK, libc::RTM_NEWADDR]), (true, 1));
        assert_eq!(of(&[libc::RTM_DELADDR]), (true, 0));
    }

    #[test]
    fn malformed_messages_end_parsing() {
        let whole = message(libc::RTM_NEWLINK, 0x41, b"eth1");
        for cut in 0..whole.len() {
            assert!(parsed(&whole[..cut]).len() <= 1);
        }
        for len in [0u32, 1, 15, u32::MAX] {
            let mut bytes = whole.clone();
            bytes[0..4].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(parsed(&bytes), []);
        }
        let mut bytes = whole;
        bytes[32..34].copy_from_slice(&0u16.to_ne_bytes());
        assert_eq!(parsed(&bytes).len(), 1);
    }
}
