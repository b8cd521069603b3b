//! The ports on which this machine may be reached.

use std::fmt;
use std::net::IpAddr;

use crate::error::{Error, ErrorKind, Result};
use crate::reason::Reason;

/// A port, or a range of them: what `CROSSRAIL_PORTS` names, and a firewall leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    /// The ports from `first` to `last`; `None` if there are none, or port 0 is among them.
    pub fn new(first: u16, last: u16) -> Option<Ports> {
        (first > 0 && first <= last).then_some(Ports { first, last })
    }

    /// Whether `port` is one of them.
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// `port` if it is in the range, otherwise a port in the range that depends only on `port`.
    pub fn nearest(self, port: u16) -> u16 {
        if self.contains(port) {
            return port;
        }
        let count = u32::from(self.last - self.first) + 1;
        self.first + (u32::from(port) % count) as u16
    }

    /// Opens a listener on a free port at `address`. Tries `preferred` first if it is in the range, then all ports from
    /// the last to the first, because tools with fixed ports use the first ones. Calls `open` with each port in turn
    /// while it fails with [`Reason::PortInUse`].
    ///
    /// # Errors
    /// [`ErrorKind::Exhausted`] if none is free; every other error of `open`.
    pub fn listen<T>(
        self,
        address: IpAddr,
        preferred: Option<u16>,
        mut open: impl FnMut(u16) -> Result<T>,
    ) -> Result<T> {
        let preferred = preferred.filter(|port| self.contains(*port));
        let others = (self.first..=self.last).rev().filter(|port| Some(*port) != preferred);
        for port in preferred.into_iter().chain(others) {
            match open(port) {
                Err(error) if error.reason == Some(Reason::PortInUse) => {}
                result => return result,
            }
        }
        let detail = format!("{address}: no port of CROSSRAIL_PORTS={self} is free");
        Err(Error::new(ErrorKind::Exhausted, "listen", detail)
            .with_reason(Reason::PortInUse)
            .with_hint("each process on this machine needs its own port: widen the range, here and in the firewall"))
    }

    /// A port or a range as text, or why it is none.
    pub(crate) fn parse(text: &str) -> std::result::Result<Ports, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<u16>().map_err(|_| format!("has {text:?} for a port"));
        Ports::new(number(first)?, number(last)?).ok_or_else(|| "is no range of ports from 1 to 65535".to_owned())
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn taken(port: u16) -> Result<u16> {
        Err(Error::new(ErrorKind::Usage, "listen", format!("{port} is in use")).with_reason(Reason::PortInUse))
    }

    #[test]
    fn ports_are_tried_from_the_last_one_down_and_the_preferred_one_first() {
        let ports = Ports::parse("18180-18183").unwrap();
        let listen = |preferred, free: u16| {
            let mut tried = Vec::new();
            let found = ports.listen(HERE, preferred, |port| {
                tried.push(port);
                if port == free { Ok(port) } else { taken(port) }
            });
            (found.ok(), tried)
        };
        assert_eq!(listen(None, 18_182), (Some(18_182), vec![18_183, 18_182]));
        assert_eq!(listen(Some(18_180), 18_181), (Some(18_181), vec![18_180, 18_183, 18_182, 18_181]));
        assert_eq!(listen(Some(9), 9), (None, vec![18_183, 18_182, 18_181, 18_180]));
    }

    #[test]
    fn an_exhausted_range_is_named_and_other_errors_are_kept() {
        let ports = Ports::parse("65535").unwrap();
        let error = ports.listen(HERE, None, taken).unwrap_err();
        assert_eq!((error.kind, error.reason), (ErrorKind::Exhausted, Some(Reason::PortInUse)));
        assert_eq!(error.detail, "127.0.0.1: no port of CROSSRAIL_PORTS=65535 is free");
        let other = |_| -> Result<u16> { Err(Error::new(ErrorKind::Io, "listen", "no descriptors")) };
        assert_eq!(ports.listen(HERE, None, other).unwrap_err().detail, "no descriptors");
    }

    #[test]
    fn a_port_outside_is_mapped_into_the_range() {
        let ports = Ports::parse("18180-18189").unwrap();
        assert_eq!(ports.nearest(18_185), 18_185);
        assert_eq!(ports.nearest(29_503), 18_183);
        assert_eq!(Ports::parse("1-65535").unwrap().nearest(0), 1);
    }
}
