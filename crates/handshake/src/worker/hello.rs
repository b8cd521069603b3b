use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;

use crossrail_types::{Checksum, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::address::Address;
use super::text::check_text;
use crate::message::Malformed;
use crate::proof::random;
use crate::secret::Secret;

/// Longest hello that is accepted, in bytes, without its head.
pub const HELLO_MAX: usize = 64 * 1024;
/// Most entries of each list.
const LIST_MAX: usize = 128;
/// Longest name of a node.
const NODE_MAX: usize = 64;

/// A rail on which a worker accepts lanes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device's name, in the form of `CROSSRAIL_NET_DEVICES`: `eth1`, `127.0.0.2`.
    pub name: String,
    /// The address it listens on.
    pub address: IpAddr,
    /// The port it listens on.
    pub port: u16,
    /// The link's speed in Mbit/s, if known.
    pub speed_mbps: Option<u32>,
    /// Whether it reaches this machine only.
    pub loopback: bool,
}

/// A worker's identity and capabilities.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The worker's id: random, never reused.
    pub worker: [u8; 16],
    /// Its display name: `host:pid`, or the user's choice.
    pub name: String,
    /// The machine's boot id: workers that share one can share memory.
    pub boot_id: String,
    /// Its process id, in its own namespace.
    pub pid: u32,
    /// Its Crossrail release, for messages.
    pub release: String,
    /// Names of the transports that its settings allow.
    pub transports: Vec<String>,
    /// The rails on which it accepts lanes. Set by [`super::Listener`].
    pub devices: Vec<Device>,
    /// Bytes of a chunk. Both ends must agree.
    pub chunk: u64,
    /// Chunks that a lane may have outstanding. Both ends must agree.
    pub window: u32,
    /// Connections per rail. Both ends must agree.
    pub channels: u32,
    /// Abstract name of its Unix socket. Set by [`super::Listener`].
    pub unix: Option<String>,
    /// The token of its address.
    pub token: [u8; 16],
    /// Addresses where it accepts sessions over TCP. Set by [`super::Listener`].
    pub control: Vec<SocketAddr>,
    /// The session that this one replaces; see [`super::upgrade`].
    pub replaces: Option<[u8; 16]>,
    /// Connections per rail that it would serve, at least `channels`.
    pub channels_max: u8,
    /// The checksum that it asks for on lanes and control connections over TCP; both ends use the stricter one. Travels
    /// as one byte behind the other fields.
    #[serde(skip)]
    pub checksum: Checksum,
    /// Its network namespace, as [`network_namespace`] names it; 0: unknown. Encoded after the checksum.
    #[serde(skip)]
    pub network: u64,
    /// The node that its settings name (`CROSSRAIL_NODE`), up to 64 bytes. Encoded after the network, as a length of one
    /// byte and the name.
    #[serde(skip)]
    pub node: Option<String>,
}

impl fmt::Debug for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hello")
            .field("name", &self.name)
            .field("boot_id", &self.boot_id)
            .field("pid", &self.pid)
            .field("release", &self.release)
            .field("transports", &self.transports)
            .field("devices", &self.devices)
            .field("chunk", &self.chunk)
            .field("window", &self.window)
            .field("channels", &self.channels)
            .field("unix", &self.unix)
            .field("control", &self.control)
            .finish_non_exhaustive()
    }
}

impl Hello {
    /// The worker's address.
    pub fn address(&self) -> Address {
        Address {
            worker: self.worker,
            name: self.name.clone(),
            boot_id: self.boot_id.clone(),
            token: self.token,
            unix: self.unix.clone(),
            control: self.control.clone(),
        }
    }

    /// Encodes the hello's body, without its head.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = postcard::to_allocvec(self)
            .map_err(|e| Error::new(ErrorKind::Usage, "worker", format!("its description: {e}")))?;
        bytes.push(code(self.checksum));
        bytes.extend(self.network.to_le_bytes());
        let node = self.node.as_deref().unwrap_or_default();
        bytes.push(u8::try_from(node.len()).unwrap_or(u8::MAX));
        bytes.extend(node.as_bytes());
        // A body that this end would reject must not be sent.
        decode_hello(&bytes).map_err(|e| Error::new(ErrorKind::Usage, "worker", format!("its description: {e}")))?;
        Ok(bytes)
    }

    /// Connections per rail that both workers would serve.
    pub fn channels_with(&self, other: &Hello) -> u32 {
        let most = |hello: &Hello| u32::from(hello.channels_max).max(hello.channels);
        most(self).min(most(other))
    }

    /// Both workers are in one network namespace: they have the same addresses, and loopback connects them.
    pub fn shares_network(&self, other: &Hello) -> bool {
        self.boot_id == other.boot_id && self.network == other.network && self.network != 0
    }

    /// The checksum that two workers use.
    pub(super) fn checksum_with(&self, other: &Hello) -> Checksum {
        self.checksum.max(other.checksum)
    }

    /// The parameters in which `self` and `other` differ, in one line that is the same at both ends.
    pub fn disagreement(&self, other: &Hello) -> Option<String> {
        let parameters = [
            ("chunk", self.chunk, other.chunk, "CROSSRAIL_CHUNK"),
            ("window", self.window.into(), other.window.into(), "CROSSRAIL_WINDOW"),
            ("channels", self.channels.into(), other.channels.into(), "CROSSRAIL_CHANNELS"),
        ];
        let differing: Vec<_> = parameters.iter().filter(|(_, mine, theirs, _)| mine != theirs).collect();
        if differing.is_empty() {
            return None;
        }
        let list = |pick: fn(&(&str, u64, u64, &str)) -> String| {
            differing.iter().map(|parameter| pick(parameter)).collect::<Vec<_>>().join(", ")
        };
        Some(format!(
            "{} has {}, {} has {}; set {} alike",
            brief(&self.name),
            list(|p| format!("{} {}", p.0, p.1)),
            brief(&other.name),
            list(|p| format!("{} {}", p.0, p.2)),
            list(|p| p.3.to_owned()),
        ))
    }

    fn validate(&self) -> std::result::Result<(), Malformed> {
        check_devices(&self.devices)?;
        let texts = [("name", &self.name), ("boot id", &self.boot_id), ("release", &self.release)];
        for (what, text) in texts {
            check_text(what, text)?;
        }
        if let Some(node) = &self.node {
            check_text("node", node)?;
        }
        if let Some(unix) = &self.unix {
            check_text("socket name", unix)?;
        }
        let lists = [("list of transports", self.transports.len()), ("list of control addresses", self.control.len())];
        for (what, length) in lists {
            if length > LIST_MAX {
                return Err(Malformed::Field(what));
            }
        }
        self.transports.iter().try_for_each(|name| check_text("transport name", name))?;
        if self.chunk == 0 || self.window == 0 || self.channels == 0 {
            return Err(Malformed::Field("chunk, window or channels of 0"));
        }
        Ok(())
    }
}

fn check_devices(devices: &[Device]) -> std::result::Result<(), Malformed> {
    if devices.len() > LIST_MAX {
        return Err(Malformed::Field("list of devices"));
    }
    devices.iter().try_for_each(|device| check_text("device name", &device.name))
}

/// Encodes rails that have changed since the hello. `None`: there are too many to be accepted.
pub fn encode_devices(devices: &[Device]) -> Option<Vec<u8>> {
    let bytes = postcard::to_allocvec(devices).ok()?;
    (decode_devices(&bytes).is_ok() && bytes.len() <= HELLO_MAX).then_some(bytes)
}

/// Decodes rails that have changed since the hello.
///
/// # Errors
/// Bytes that are none, or trail them; more rails, or longer names, than a hello may have.
pub fn decode_devices(bytes: &[u8]) -> std::result::Result<Vec<Device>, Malformed> {
    let (devices, rest): (Vec<Device>, _) =
        postcard::take_from_bytes(bytes).map_err(|_| Malformed::Field("list of devices"))?;
    if !rest.is_empty() {
        return Err(Malformed::Field("bytes after a list of devices"));
    }
    check_devices(&devices)?;
    Ok(devices)
}

/// Shortens a name, to leave room for the rest of a [`crate::Reject`]'s text.
fn brief(name: &str) -> String {
    if name.len() <= 32 { name.to_owned() } else { name.chars().take(20).chain(['…']).collect() }
}

/// A checksum as it travels.
fn code(checksum: Checksum) -> u8 {
    match checksum {
        Checksum::Off => 0,
        Checksum::Crc => 1,
    }
}

/// Decodes a hello's body. Ignores bytes after the known fields: later releases may append fields.
pub fn decode_hello(bytes: &[u8]) -> std::result::Result<Hello, Malformed> {
    if bytes.len() > HELLO_MAX {
        return Err(Malformed::TooLong { limit: HELLO_MAX, announced: bytes.len() as u64 });
    }
    let (mut hello, rest) =
        postcard::take_from_bytes::<Hello>(bytes).map_err(|_| Malformed::Field("hello's fields"))?;
    let byte = rest.first().ok_or(Malformed::Field("hello's checksum"))?;
    let known = [Checksum::Off, Checksum::Crc].into_iter().find(|checksum| code(*checksum) == *byte);
    hello.checksum = known.ok_or(Malformed::Field("CROSSRAIL_CHECKSUM of another release"))?;
    // An earlier release ends here.
    hello.network = rest[1..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    hello.node = decode_node(rest.get(9..).unwrap_or_default())?;
    hello.validate()?;
    Ok(hello)
}

/// The node's name in what follows the network; an earlier release sends nothing there.
fn decode_node(bytes: &[u8]) -> std::result::Result<Option<String>, Malformed> {
    let Some((len, rest)) = bytes.split_first() else { return Ok(None) };
    let name = rest.get(..usize::from(*len)).filter(|name| name.len() <= NODE_MAX);
    let name = name.and_then(|name| std::str::from_utf8(name).ok()).ok_or(Malformed::Field("hello's node"))?;
    Ok(Some(name.to_owned()).filter(|name| !name.is_empty()))
}

/// A worker's hello, and the secret that it expects of its peers.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The hello sent to the peer.
    pub hello: Hello,
    /// The secret that the peer must prove to know.
    pub secret: Secret,
}

/// What a worker's settings contribute to its hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Chunks that a lane may have outstanding.
    pub window: u32,
    /// Connections per rail.
    pub channels: u32,
    /// Connections per rail that this end would serve, if they gain something.
    pub channels_max: u8,
    /// The checksum over TCP; of two that differ, the stricter one.
    pub checksum: Checksum,
    /// The node that this end belongs to, if it is named.
    pub node: Option<String>,
}

impl Identity {
    /// Creates an identity with fresh id and token; the default of `name` is `host:pid`.
    ///
    /// # Errors
    /// `Io` if the kernel gives no random bytes; `Usage` if the name is too long or has control characters.
    pub fn new(
        name: Option<String>,
        secret: Secret,
        transports: Vec<String>,
        parameters: Parameters,
    ) -> Result<Identity> {
        let pid = std::process::id();
        let hello = Hello {
            worker: random()?,
            name: name.unwrap_or_else(|| format!("{}:{pid}", host_name())),
            boot_id: boot_id()?,
            pid,
            release: env!("CARGO_PKG_VERSION").to_owned(),
            transports,
            devices: Vec::new(),
            chunk: parameters.chunk,
            window: parameters.window,
            channels: parameters.channels,
            unix: None,
            token: random()?,
            control: Vec::new(),
            replaces: None,
            channels_max: parameters.channels_max,
            checksum: parameters.checksum,
            network: network_namespace(),
            node: parameters.node,
        };
        hello.encode()?;
        Ok(Identity { hello, secret })
    }
}

/// This process's network namespace: a number that no other has on this machine until it boots again. 0: unknown.
pub fn network_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/net").map_or(0, |namespace| namespace.ino())
}

fn host_name() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/hostname") {
        Ok(name) => name.trim().to_owned(),
        Err(_) => "localhost".to_owned(),
    }
}

/// The kernel's boot id, or a random one if it cannot be read: the worker then treats every peer as remote, which is
/// slow but correct.
fn boot_id() -> Result<String> {
    match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(_) => Ok(format!("unknown-{:032x}", u128::from_le_bytes(random()?))),
    }
}
