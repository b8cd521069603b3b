//! What two ranks tell each other when they connect.

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::config::{Config, Layout, Payload};

/// The tag of the message; and the version of everything that ranks agree on.
pub(crate) const TAG: u64 = 0x4550_0000_0001_0001;
/// Of a [`Word`].
pub(crate) const READY: u64 = 0x4550_0000_0001_0002;
/// Longer ones are refused before anything is allocated.
pub(crate) const LONGEST: usize = 4096;

/// What the store says of a rank's buffer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Ranks of equal `node` map each other's heaps.
    pub(crate) node: String,
    /// The address of its worker.
    pub(crate) address: Vec<u8>,
}

impl Place {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Place> {
        decode(bytes, "what the store says of a rank")
    }
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| Error::new(ErrorKind::Protocol, "connect", error.to_string()))
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| Error::new(ErrorKind::Protocol, "connect", format!("{what}: {error}")))
}

/// What a rank says of its buffer.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The rank that says it.
    pub rank: u32,
    /// What its buffer was made for.
    pub parameters: Parameters,
    /// Operations, dispatches, combines begun.
    pub counts: [u64; 3],
    /// The heap, for a rank that maps it.
    pub shared: Option<Vec<u8>>,
    /// The heap's key, for a rank that writes it through the engine.
    pub key: Vec<u8>,
    /// What the receiver's writes are to be counted as.
    pub generation: u32,
}

/// What must be alike on both ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    ranks: u32,
    max_tokens_per_rank: u64,
    hidden: u64,
    num_experts: u64,
    topk: u64,
    payload: Payload,
    layouts: Vec<Layout>,
    prereduce: bool,
    /// `cpu` or `cuda`.
    device: String,
    /// Results of the rank layout that a rank's heap has memory for; 0 where it has none of its own.
    regions: u32,
}

impl Parameters {
    /// Those of a buffer in host memory.
    pub fn of(config: &Config) -> Parameters {
        let mut layouts = config.layouts.clone();
        layouts.sort_by_key(|layout| *layout == Layout::Rank);
        layouts.dedup();
        Parameters {
            ranks: config.ranks,
            max_tokens_per_rank: config.max_tokens as u64,
            hidden: config.hidden as u64,
            num_experts: config.experts as u64,
            topk: config.topk as u64,
            payload: config.payload,
            layouts,
            prereduce: config.prereduce,
            device: "cpu".to_owned(),
            regions: 0,
        }
    }

    /// The same for a buffer in GPU memory, with memory for so many results of the rank layout.
    pub fn on_gpu(self, regions: u32) -> Parameters {
        Parameters { device: "cuda".to_owned(), regions, ..self }
    }

    /// The most ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Compares with those of rank `other`.
    ///
    /// # Errors
    /// `Mismatch` naming the first that differs, and both ranks.
    pub fn check(&self, mine: u32, theirs: &Parameters, other: u32) -> Result<()> {
        let rows = [
            ("ranks", format!("{:?}", self.ranks), format!("{:?}", theirs.ranks)),
            (
                "max_tokens_per_rank",
                format!("{:?}", self.max_tokens_per_rank),
                format!("{:?}", theirs.max_tokens_per_rank),
            ),
            ("hidden", format!("{:?}", self.hidden), format!("{:?}", theirs.hidden)),
            ("num_experts", format!("{:?}", self.num_experts), format!("{:?}", theirs.num_experts)),
            ("topk", format!("{:?}", self.topk), format!("{:?}", theirs.topk)),
            ("dispatch_dtype", format!("{:?}", self.payload), format!("{:?}", theirs.payload)),
            ("layouts", format!("{:?}", self.layouts), format!("{:?}", theirs.layouts)),
            ("prereduce", format!("{:?}", self.prereduce), format!("{:?}", theirs.prereduce)),
            ("device", self.device.clone(), theirs.device.clone()),
            ("regions", format!("{:?}", self.regions), format!("{:?}", theirs.regions)),
        ];
        match rows.into_iter().find(|(_, here, there)| here != there) {
            None => Ok(()),
            Some((name, here, there)) => {
                let text = format!("{name} is {here} on rank {mine} and {there} on rank {other}");
                Err(Error::new(ErrorKind::Mismatch, "connect", text)
                    .with_hint("make the buffer with the same parameters on every rank"))
            }
        }
    }
}

/// What a rank says last.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Word {
    /// It is ready, and tells something.
    Ready(Vec<u8>),
    /// It gives up.
    Refused(Cause, String),
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Cause {
    Mismatch,
    Timeout,
    Other,
}

impl Word {
    /// `None`: the rank's buffer is destroyed, and others wait for its next one.
    pub(crate) fn refusal(error: &Error) -> Option<Word> {
        let cause = match error.kind {
            ErrorKind::Closed => return None,
            ErrorKind::Mismatch => Cause::Mismatch,
            ErrorKind::Timeout => Cause::Timeout,
            _ => Cause::Other,
        };
        let peer = error.peer.as_ref().map(|peer| format!("{peer}: ")).unwrap_or_default();
        Some(Word::Refused(cause, format!("{peer}{}", error.detail).chars().take(LONGEST / 8).collect()))
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Word> {
        decode(bytes, "the peer's last word")
    }

    /// What rank `from` told; if it gave up, why.
    pub(crate) fn ready(self, from: u32) -> Result<Vec<u8>> {
        let (cause, text) = match self {
            Word::Ready(told) => return Ok(told),
            Word::Refused(cause, text) => (cause, text),
        };
        let kind = match cause {
            Cause::Mismatch => ErrorKind::Mismatch,
            Cause::Timeout => ErrorKind::Timeout,
            Cause::Other => ErrorKind::Refused,
        };
        Err(Error::new(kind, "connect", format!("it gave up: {text}")).with_peer(format!("rank {from}")))
    }
}

impl Hello {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Hello> {
        decode(bytes, "the peer's hello")
    }
}
