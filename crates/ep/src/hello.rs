//! The messages that two ranks exchange when they connect.

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::config::{Config, Layout, OnLoss, Payload};

/// Tag of a [`Hello`]; its number is the version of the protocol between ranks.
pub(crate) const HELLO_TAG: u64 = 0x4550_0000_0005_0001;
/// Tag of a [`Verdict`].
pub(crate) const VERDICT_TAG: u64 = 0x4550_0000_0005_0002;
/// Upper bound on the bytes of a message: longer ones are refused before anything is allocated.
pub const MAX_MESSAGE: usize = 8192;

/// A rank's entry in the store.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Announcement {
    /// Ranks of equal `node` map each other's heaps.
    pub(crate) node: String,
    /// The address of its worker.
    pub(crate) address: Vec<u8>,
}

impl Announcement {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Announcement> {
        decode(bytes, "the store's entry of a rank")
    }
}

pub(crate) fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| Error::new(ErrorKind::Protocol, "connect", error.to_string()))
}

pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8], what: &str) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| Error::new(ErrorKind::Protocol, "connect", format!("{what}: {error}")))
}

/// What a rank sends first: its parameters, and how its heap is reached.
#[derive(Debug, Serialize, Deserialize)]
pub struct Hello {
    /// The sender.
    pub rank: u32,
    /// The parameters of its buffer.
    pub parameters: Parameters,
    /// Sequence numbers of its last operation, dispatch and combine.
    pub counts: [u64; 3],
    /// Number of its view.
    pub view: u64,
    /// Descriptor of its heap, if the receiver is to map it.
    pub shared: Option<Vec<u8>>,
    /// Number of the receiver's inbox in that heap, in GPU memory.
    pub inbox: u32,
    /// Key of its heap, for writes through the engine.
    pub key: Vec<u8>,
    /// Number of the connection, which the receiver puts into the immediate values of its writes.
    pub generation: u32,
}

/// The parameters that must be equal on all ranks.
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
    on_loss: OnLoss,
    /// `cpu` or `cuda`.
    device: String,
    /// Results of the rank layout that a heap has regions for; 0 in host memory.
    regions: u32,
    /// Ranks on other nodes may connect to a buffer in GPU memory, whose heap then has room for it.
    between_nodes: bool,
    /// Ranks of each node if rows go once to each node; 0: once to each rank.
    node_ranks: u32,
}

impl Parameters {
    /// The parameters of a buffer in host memory.
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
            on_loss: config.on_loss,
            device: "cpu".to_owned(),
            regions: 0,
            between_nodes: false,
            node_ranks: 0,
        }
    }

    /// The same for a buffer in GPU memory with this many regions for results of the rank layout.
    pub fn on_gpu(self, regions: u32, between_nodes: bool) -> Parameters {
        Parameters { device: "cuda".to_owned(), regions, between_nodes, ..self }
    }

    /// These parameters with rows that go once to each node of `node_ranks` ranks; 0: once to each rank.
    pub fn once_per(self, node_ranks: u32) -> Parameters {
        Parameters { node_ranks, ..self }
    }

    /// The maximum number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Compares with the parameters of rank `other`.
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
            ("on_loss", self.on_loss.to_string(), theirs.on_loss.to_string()),
            ("device", self.device.clone(), theirs.device.clone()),
            ("regions", format!("{:?}", self.regions), format!("{:?}", theirs.regions)),
            ("between_nodes", format!("{:?}", self.between_nodes), format!("{:?}", theirs.between_nodes)),
            ("node_ranks of send=\"node\"", format!("{:?}", self.node_ranks), format!("{:?}", theirs.node_ranks)),
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

/// What a rank sends last, when it has connected or given up.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Verdict {
    /// It is ready; the bytes are the payload of [`Meeting::all_ready`](crate::meeting::Meeting::all_ready).
    Ready(Vec<u8>),
    /// It gave up, with this reason.
    Refused(Cause, String),
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Cause {
    Mismatch,
    Timeout,
    Other,
}

impl Verdict {
    /// The verdict for `error`. `None` if the rank's buffer is destroyed: the others wait for its next one.
    pub(crate) fn refusal(error: &Error) -> Option<Verdict> {
        let cause = match error.kind {
            ErrorKind::Closed => return None,
            ErrorKind::Mismatch => Cause::Mismatch,
            ErrorKind::Timeout => Cause::Timeout,
            _ => Cause::Other,
        };
        let peer = error.peer.as_ref().map(|peer| format!("{peer}: ")).unwrap_or_default();
        Some(Verdict::Refused(cause, format!("{peer}{}", error.detail).chars().take(MAX_MESSAGE / 8).collect()))
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Verdict> {
        decode(bytes, "the peer's verdict")
    }

    /// The payload of rank `from`; its reason as an error, if it gave up.
    pub(crate) fn ready(self, from: u32) -> Result<Vec<u8>> {
        let (cause, text) = match self {
            Verdict::Ready(told) => return Ok(told),
            Verdict::Refused(cause, text) => (cause, text),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Each pair of ranks exchanges a hello and a verdict each way, of as many bytes whatever the number of ranks.
    #[test]
    fn a_rank_sends_each_other_rank_as_many_bytes_whatever_their_number() {
        let of = |ranks: u32| {
            let config = Config {
                ranks,
                max_tokens: 128,
                hidden: 7168,
                experts: 1024,
                topk: 8,
                payload: Payload::Bf16,
                layouts: vec![Layout::Expert],
                prereduce: true,
                share_node: true,
                timeout: Duration::from_secs(1),
                on_loss: OnLoss::Raise,
            };
            let hello = Hello {
                rank: ranks - 1,
                parameters: Parameters::of(&config).on_gpu(2, true).once_per(8),
                counts: [1 << 20; 3],
                view: 1,
                shared: Some(vec![1; 200]),
                inbox: ranks - 1,
                key: Vec::new(),
                generation: 0,
            };
            let bytes = hello.encode().unwrap().len() + Verdict::Ready(vec![1; 200]).encode().unwrap().len();
            let others = ranks as usize - 1;
            println!("{ranks} ranks: each sends {} messages of {} bytes in all", 2 * others, bytes * others);
            bytes
        };
        assert_eq!(of(256), of(1024));
    }
}
