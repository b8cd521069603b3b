//! Generic netlink, as far as device memory needs it: one request, its answers, attributes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::ReceiveTimeout;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::sys;

/// How long the kernel may take to answer. It answers within the call that asks.
const ANSWER_MS: i64 = 2000;
/// Bytes of a datagram of answers.
const ANSWER_BYTES: usize = 64 * 1024;
/// Datagrams of one answer: what a peer could make endless ends here.
const ANSWERS: usize = 1024;

const MESSAGE_HEAD: usize = 16;
const COMMAND_HEAD: usize = 4;
const SOL_NETLINK: i32 = 270;
const EXTENDED_ACK: i32 = 11;
const CAP_ACK: i32 = 10;
const FAMILY_OF_CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const ERROR_TEXT: u16 = 1;
/// Flag of an attribute that contains others.
const NESTED: u16 = 1 << 15;
const KIND: u16 = 0x3fff;

/// A request that the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) errno: i32,
    /// The kernel's own words, if it gave any.
    pub(crate) text: String,
}

impl Refused {
    fn of(error: Errno) -> Refused {
        Refused { errno: error as i32, text: String::new() }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let error = io::Error::from_raw_os_error(self.errno);
        if self.text.is_empty() { write!(f, "{error}") } else { write!(f, "{} ({error})", self.text) }
    }
}

/// Attributes of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attributes(Vec<u8>);

impl Attributes {
    pub(crate) fn bytes(mut self, kind: u16, value: &[u8]) -> Attributes {
        let len = (4 + value.len()) as u16;
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(crate) fn u32(self, kind: u16, value: u32) -> Attributes {
        self.bytes(kind, &value.to_ne_bytes())
    }

    #[cfg(test)]
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn nested(self, kind: u16, inner: &Attributes) -> Attributes {
        self.bytes(kind | NESTED, &inner.0)
    }
}

/// The attributes in `bytes`, up to the first that does not fit.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & KIND;
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

/// The number in the attribute `kind` of `bytes`.
pub(crate) fn number(bytes: &[u8], kind: u16) -> Option<u32> {
    let (_, value) = attributes(bytes).find(|(of, _)| *of == kind)?;
    match *value {
        [one] => Some(u32::from(one)),
        [a, b] => Some(u32::from(u16::from_ne_bytes([a, b]))),
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d])),
        _ => None,
    }
}

/// A family of requests, such as `netdev`.
#[derive(Debug)]
pub(crate) struct Family {
    socket: OwnedFd,
    id: u16,
}

impl Family {
    /// Opens the family called `name`.
    pub(crate) fn open(name: &str) -> Result<Family, Refused> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkGeneric);
        let socket = socket.map_err(Refused::of)?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0)).map_err(Refused::of)?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::milliseconds(ANSWER_MS)).map_err(Refused::of)?;
        for option in [EXTENDED_ACK, CAP_ACK] {
            // Without it, errors come without the kernel's words.
            let _ = sys::set_int(socket.as_raw_fd(), SOL_NETLINK, option, 1);
        }
        let mut family = Family { socket, id: FAMILY_OF_CONTROL };
        let named = Attributes::default().bytes(FAMILY_NAME, &[name.as_bytes(), &[0]].concat());
        let answers = family.ask(GET_FAMILY, false, &named)?;
        let id = answers.iter().find_map(|answer| number(answer, FAMILY_ID));
        family.id = id.and_then(|id| u16::try_from(id).ok()).ok_or_else(|| Refused::of(Errno::EPROTO))?;
        Ok(family)
    }

    /// Sends `command` and returns the attributes of each answer; `all` asks for every object there is.
    pub(crate) fn ask(&self, command: u8, all: bool, attributes: &Attributes) -> Result<Vec<Vec<u8>>, Refused> {
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | if all { libc::NLM_F_DUMP } else { 0 };
        let len = MESSAGE_HEAD + COMMAND_HEAD + attributes.0.len();
        let mut request = Vec::with_capacity(len);
        request.extend((len as u32).to_ne_bytes());
        request.extend(self.id.to_ne_bytes());
        request.extend((flags as u16).to_ne_bytes());
        request.extend([0; 8]); // sequence number and port: one request at a time, and the kernel fills in the port
        request.extend([command, 1, 0, 0]);
        request.extend(&attributes.0);
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty()).map_err(Refused::of)?;
        let mut answers = Vec::new();
        let mut buffer = vec![0; ANSWER_BYTES];
        for _ in 0..ANSWERS {
            let n = match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Err(Errno::EINTR) => continue,
                received => received.map_err(Refused::of)?,
            };
            if read(&buffer[..n.min(ANSWER_BYTES)], &mut answers)? {
                return Ok(answers);
            }
        }
        Err(Refused::of(Errno::EPROTO))
    }
}

/// Takes the answers out of a datagram. Whether it was the last.
fn read(mut bytes: &[u8], answers: &mut Vec<Vec<u8>>) -> Result<bool, Refused> {
    let u32_at = |bytes: &[u8], at: usize| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
    while let Some(len) = u32_at(bytes, 0) {
        let len = len as usize;
        let Some(message) = bytes.get(MESSAGE_HEAD..len) else { return Err(Refused::of(Errno::EPROTO)) };
        let kind = i32::from(u16::from_ne_bytes([bytes[4], bytes[5]]));
        match kind {
            libc::NLMSG_ERROR | libc::NLMSG_DONE => {
                let code = u32_at(message, 0).map_or(0, |code| code as i32);
                return if code == 0 { Ok(true) } else { Err(refusal(code, message, bytes[6..8] != [0, 0])) };
            }
            libc::NLMSG_NOOP => {}
            _ => answers.extend(message.get(COMMAND_HEAD..).map(<[u8]>::to_vec)),
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Ok(false)
}

/// An error, with the kernel's words. With CAP_ACK the head of the request follows the code, and then attributes.
fn refusal(code: i32, message: &[u8], has_more: bool) -> Refused {
    let more = if has_more { message.get(4 + MESSAGE_HEAD..).unwrap_or(&[]) } else { &[] };
    let words = attributes(more).find(|(kind, _)| *kind == ERROR_TEXT).map_or(&[][..], |(_, text)| text);
    let words = words.split(|byte| *byte == 0).next().unwrap_or(&[]);
    Refused { errno: code.wrapping_neg(), text: String::from_utf8_lossy(words).into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: i32, flags: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((MESSAGE_HEAD + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend((kind as u16).to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let inner = Attributes::default().u32(1, 7);
        let written = Attributes::default().bytes(2, b"abc").nested(3, &inner).0;
        let read: Vec<_> = attributes(&written).collect();
        assert_eq!(read, [(2, &b"abc"[..]), (3, &inner.0[..])]);
        assert_eq!((number(&inner.0, 1), number(&inner.0, 2), number(&written, 2)), (Some(7), None, None));
    }

    #[test]
    fn refusals_have_the_words_of_the_kernel() {
        let mut body = (-libc::EOPNOTSUPP).to_ne_bytes().to_vec();
        body.extend([0; MESSAGE_HEAD]);
        body.extend(Attributes::default().bytes(ERROR_TEXT, b"tcp-data-split is disabled\0").0);
        let refused = read(&message(libc::NLMSG_ERROR, 0x200, &body), &mut Vec::new()).unwrap_err();
        assert_eq!((refused.errno, refused.text.as_str()), (libc::EOPNOTSUPP, "tcp-data-split is disabled"));
    }

    #[test]
    fn truncated_answers_are_refused_or_ask_for_more() {
        let answer = [0; COMMAND_HEAD].into_iter().chain(Attributes::default().u32(1, 28).0).collect::<Vec<_>>();
        let whole = [message(28, 0, &answer), message(libc::NLMSG_ERROR, 0, &[0; 20])].concat();
        let mut answers = Vec::new();
        assert_eq!(read(&whole, &mut answers), Ok(true));
        assert_eq!(number(&answers[0], 1), Some(28));
        for cut in 0..whole.len() {
            assert_ne!(read(&whole[..cut], &mut Vec::new()), Ok(true), "{cut} bytes");
        }
        for len in [0, 1, 15, u32::MAX] {
            let mut bytes = whole.clone();
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
            assert!(read(&bytes, &mut Vec::new()).is_err(), "length {len}");
        }
    }

    #[test]
    fn a_family_that_no_kernel_has_is_refused() {
        assert_eq!(Family::open("no such family").err().map(|refused| refused.errno), Some(libc::ENOENT));
    }
}
