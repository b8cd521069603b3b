//! Whether a network device can place received payload in device memory, found by asking the kernel.

use super::netlink::{Attributes, Family, Refused, attributes, number};
use super::{BIND_RX, NETDEV, QUEUE_GET, QUEUE_IFINDEX, QUEUE_TYPE, RX, binding};

/// ethtool's request for rings, and its attributes.
const ETHTOOL: &str = "ethtool";
const RINGS_GET: u8 = 15;
const RINGS_HEADER: u16 = 1;
const HEADER_INDEX: u16 = 1;
const TCP_DATA_SPLIT: u16 = 11;
const HDS_THRESHOLD: u16 = 17;
/// A value of TCP_DATA_SPLIT.
const ENABLED: u32 = 2;

/// A device that can do it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Number of receive queues. Those that memory is bound to carry nothing else.
    pub queues: usize,
}

/// What is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// What, in one line.
    pub reason: String,
    /// A command or a step that helps, if there is one.
    pub fix: Option<String>,
}

impl Missing {
    fn new(reason: impl Into<String>, fix: Option<String>) -> Missing {
        Missing { reason: reason.into(), fix }
    }
}

/// Whether the device `name` with the index `ifindex` can place received payload in device memory. Changes nothing: the
/// last step asks the kernel to bind a descriptor that is none. Takes below a millisecond, and at most some seconds.
///
/// # Errors
/// The first thing that is missing: the kernel, the driver, the split of headers, queues, the privilege.
pub fn probe(name: &str, ifindex: u32) -> Result<Ready, Missing> {
    let kernel = |refused: Refused| {
        Missing::new(
            format!("the kernel does not have it: netlink family {NETDEV}: {refused}"),
            Some("a kernel from Linux 6.12 on, with CONFIG_NET_DEVMEM".to_owned()),
        )
    };
    let netdev = Family::open(NETDEV).map_err(kernel)?;
    let header = Attributes::default().u32(HEADER_INDEX, ifindex);
    let rings = Family::open(ETHTOOL)
        .and_then(|ethtool| ethtool.ask(RINGS_GET, false, &Attributes::default().nested(RINGS_HEADER, &header)));
    splits(name, rings)?;
    // An old kernel knows the family and not the request.
    let dump = netdev.ask(QUEUE_GET, true, &Attributes::default().u32(QUEUE_IFINDEX, ifindex)).map_err(kernel)?;
    let queues = dump.iter().filter(|queue| is_receive_queue(queue, ifindex)).count();
    if queues < 2 {
        let fix = Some(format!("ethtool -L {name} combined 2"));
        return Err(Missing::new("one receive queue only, and a bound one carries nothing else", fix));
    }
    bindable(netdev.ask(BIND_RX, false, &binding(ifindex, &[queues as u32 - 1], -1)))?;
    Ok(Ready { queues })
}

fn is_receive_queue(queue: &[u8], ifindex: u32) -> bool {
    let of_device = number(queue, QUEUE_IFINDEX) == Some(ifindex);
    of_device && number(queue, QUEUE_TYPE) == Some(RX) && attributes(queue).next().is_some()
}

/// Whether the answer about the device's rings says that headers and payload are split, whatever the packet's length.
fn splits(name: &str, rings: Result<Vec<Vec<u8>>, Refused>) -> Result<(), Missing> {
    let rings = match rings {
        Ok(answers) => answers.into_iter().next().unwrap_or_default(),
        Err(refused) if refused.errno == libc::EOPNOTSUPP => Vec::new(),
        Err(refused) => return Err(Missing::new(format!("ethtool's rings of {name}: {refused}"), None)),
    };
    let fix = |setting: &str| Some(format!("ethtool -G {name} {setting}"));
    match number(&rings, TCP_DATA_SPLIT) {
        Some(ENABLED) => {}
        Some(0) | None => {
            let fix = "a NIC whose driver does: bnxt_en, gve, mlx5_core, and fbnic of recent kernels";
            let reason = "its driver does not split headers from payload (tcp-data-split)";
            return Err(Missing::new(reason, Some(fix.to_owned())));
        }
        Some(_) => return Err(Missing::new("headers are not split from payload", fix("tcp-data-split on"))),
    }
    match number(&rings, HDS_THRESHOLD) {
        None | Some(0) => Ok(()),
        Some(threshold) => {
            let reason = format!("headers of packets up to {threshold} bytes are not split from payload");
            Err(Missing::new(reason, fix("hds-thresh 0")))
        }
    }
}

/// Whether the kernel refused to bind a descriptor that is none for no other reason than that.
fn bindable(answer: Result<Vec<Vec<u8>>, Refused>) -> Result<(), Missing> {
    match answer {
        Ok(_) => Err(Missing::new("the kernel bound a descriptor that is none", None)),
        Err(refused) if matches!(refused.errno, libc::EBADF | libc::EINVAL) => Ok(()),
        Err(refused) if refused.errno == libc::EPERM => {
            let fix = "run as root, or docker run --cap-add=NET_ADMIN".to_owned();
            Err(Missing::new("this process may not bind memory to queues (CAP_NET_ADMIN)", Some(fix)))
        }
        Err(refused) => {
            let fix = "a kernel with CONFIG_NET_DEVMEM, and a driver that can restart single queues".to_owned();
            Err(Missing::new(format!("the kernel binds no memory to its queues: {refused}"), Some(fix)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rings(split: Option<u8>, threshold: Option<u32>) -> Result<Vec<Vec<u8>>, Refused> {
        let answer = Attributes::default().u32(6, 1024);
        let answer = split.into_iter().fold(answer, |answer, split| answer.bytes(TCP_DATA_SPLIT, &[split]));
        let answer = threshold.into_iter().fold(answer, |answer, bytes| answer.u32(HDS_THRESHOLD, bytes));
        Ok(vec![answer.into_bytes()])
    }

    fn refused(errno: i32) -> Result<Vec<Vec<u8>>, Refused> {
        Err(Refused { errno, text: String::new() })
    }

    fn fix_of(answer: Result<Vec<Vec<u8>>, Refused>) -> String {
        splits("eth9", answer).unwrap_err().fix.unwrap_or_default()
    }

    #[test]
    fn headers_must_be_split_at_any_length() {
        assert_eq!(splits("eth9", rings(Some(2), None)), Ok(()));
        assert_eq!(splits("eth9", rings(Some(2), Some(0))), Ok(()));
        assert_eq!(fix_of(rings(Some(2), Some(256))), "ethtool -G eth9 hds-thresh 0");
        assert_eq!(fix_of(rings(Some(1), None)), "ethtool -G eth9 tcp-data-split on");
        for answer in [rings(None, None), rings(Some(0), None), refused(libc::EOPNOTSUPP), Ok(vec![])] {
            assert!(fix_of(answer).contains("whose driver does"));
        }
        assert!(splits("eth9", refused(libc::EIO)).is_err());
    }

    #[test]
    fn only_the_descriptor_may_be_wrong() {
        assert_eq!(bindable(refused(libc::EBADF)), Ok(()));
        assert!(bindable(refused(libc::EPERM)).unwrap_err().reason.contains("CAP_NET_ADMIN"));
        assert!(bindable(refused(libc::EOPNOTSUPP)).unwrap_err().fix.is_some());
        assert!(bindable(Ok(vec![])).is_err());
    }

    #[test]
    fn loopback_cannot_and_says_why() {
        let missing = probe("lo", 1).unwrap_err();
        assert!(!missing.reason.is_empty(), "{missing:?}");
    }
}
