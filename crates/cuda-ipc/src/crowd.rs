//! Long copies from one GPU to several others at once, and the kernel that then makes them.
//!
//! A GPU's copy engines carry copies to its peers one after the other, whatever streams they are in. Alone, that is the
//! fastest way, and it leaves the multiprocessors to the user. When all GPUs send to all, two of them soon write to the same
//! third, each at half its rate, while another's links are idle: four H200s got 230 to 250 of 395 GB/s (so does a model of
//! four queues whose heads block; sending in turns, or in smaller pieces, is no better unless all begin at the same moment).
//! Kernels write to all at the same time; by bulk copies, 16 blocks together got 326 GB/s, 32 341 and 132 353.
//!
//! Where engines are asked for, they are given one peer's copies after the other's: all that there are for one, beginning
//! with the GPU whose name comes next after this one's. If all GPUs do that, each writes to another one for a long time,
//! and what they begin apart by is little against it: in the model 360 to 390 GB/s with 16 copies of 64 MiB for each peer,
//! where GPUs begin within 200 us; with one or four it takes more luck.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use crossrail_cuda::Context;
use crossrail_kernels::Kernels;
use crossrail_types::{GpuCopy, Settings};

use crate::domain::locked;
use crate::note::Uuid;

/// Blocks that copy at once, to all peers together; each takes a multiprocessor's shared memory while it runs. Twice as many
/// carry 2 % more.
const BLOCKS: u32 = 64;
/// To one peer. 8 fill the links if nobody else is at work.
const MOST_BLOCKS: u32 = 32;
const LEAST_BLOCKS: u32 = 8;

/// Bytes that an engine is given ahead, and in one peer's turn while others wait.
const AHEAD: u64 = 64 << 20;
const TURN: u64 = 2 << 30;

/// Who one GPU of this process writes to, and reads from, by long copies.
pub(crate) struct Crowd {
    own: Uuid,
    way: GpuCopy,
    settings: Settings,
    turns: Mutex<Turns>,
    kernels: Arc<OnceLock<Result<Arc<Kernels>, String>>>,
    loading: Mutex<Option<JoinHandle<()>>>,
}

/// The other GPUs, and whose turn it is.
#[derive(Default)]
struct Turns {
    peers: Vec<Peer>,
    current: Option<Uuid>,
    /// Bytes that were begun in this turn, and whether no turn has ended since nothing was under way.
    bytes: u64,
    fresh: bool,
}

/// Copies between this GPU and another: those that wait for their turn, those under way, and the bytes of these.
struct Peer {
    name: Uuid,
    waiting: u32,
    under_way: u32,
    bytes: u64,
}

impl Turns {
    fn peer(&mut self, name: Uuid) -> &mut Peer {
        let at = self.peers.iter().position(|peer| peer.name == name).unwrap_or_else(|| {
            self.peers.push(Peer { name, waiting: 0, under_way: 0, bytes: 0 });
            self.peers.len() - 1
        });
        &mut self.peers[at]
    }

    /// Whether a copy for that peer may begin now. `own`: this GPU.
    fn admits(&mut self, own: Uuid, name: Uuid) -> bool {
        if self.peers.iter().all(|peer| peer.name == name || (peer.waiting == 0 && peer.under_way == 0)) {
            self.give(name, true);
            return true;
        }
        let nearest = |from: Uuid| {
            let waiting = self.peers.iter().filter(|peer| peer.waiting > 0).map(|peer| peer.name);
            waiting.min_by_key(|peer| distance(from, *peer)).unwrap_or(name)
        };
        match self.current {
            None => self.give(nearest(own), true),
            Some(current) => {
                let left = self.peers.iter().any(|peer| peer.name == current && peer.waiting + peer.under_way > 0);
                let first = nearest(own);
                if !left || self.bytes >= TURN {
                    self.give(nearest(current), false);
                } else if self.fresh && distance(own, first) < distance(own, current) {
                    // It was not known of yet when the first turn began: answers of several peers come in any order.
                    self.give(first, true);
                }
            }
        }
        let (count, bytes) = self.peers.iter().fold((0, 0), |sum, peer| (sum.0 + peer.under_way, sum.1 + peer.bytes));
        self.current == Some(name) && (count < 2 || bytes < AHEAD)
    }

    fn give(&mut self, name: Uuid, fresh: bool) {
        if self.current != Some(name) || self.bytes >= TURN {
            (self.current, self.bytes, self.fresh) = (Some(name), 0, fresh);
        }
    }

    /// Nobody's turn is remembered once nothing is left.
    fn settle(&mut self) {
        if self.peers.iter().all(|peer| peer.waiting == 0 && peer.under_way == 0) {
            (self.current, self.bytes, self.fresh) = (None, 0, false);
        }
    }
}

/// In the circle of GPUs by name, how far it is from one to another, as something that can be compared; to itself furthest.
fn distance(from: Uuid, to: Uuid) -> (bool, Uuid) {
    (to <= from, to)
}

/// A long copy that waits for its turn.
pub(crate) struct Waiting {
    crowd: Arc<Crowd>,
    peer: Uuid,
}

impl Waiting {
    pub(crate) fn may_begin(&self) -> bool {
        locked(&self.crowd.turns).admits(self.crowd.own, self.peer)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let turns = &mut *locked(&self.crowd.turns);
        turns.peer(self.peer).waiting -= 1;
        turns.settle();
    }
}

/// A long copy that is under way.
pub(crate) struct UnderWay {
    crowd: Arc<Crowd>,
    peer: Uuid,
    len: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let turns = &mut *locked(&self.crowd.turns);
        let peer = turns.peer(self.peer);
        (peer.under_way, peer.bytes) = (peer.under_way - 1, peer.bytes - self.len);
        turns.settle();
    }
}

impl Crowd {
    pub(crate) fn new(own: Uuid, settings: &Settings) -> Crowd {
        Crowd {
            own,
            way: settings.gpu_copy,
            settings: settings.clone(),
            turns: Mutex::default(),
            kernels: Arc::default(),
            loading: Mutex::default(),
        }
    }

    /// A long copy to that GPU is to be made: where copies take turns, what waits for its own.
    pub(crate) fn wait(self: &Arc<Self>, peer: Uuid) -> Option<Waiting> {
        if self.way != GpuCopy::Engine {
            return None;
        }
        locked(&self.turns).peer(peer).waiting += 1;
        Some(Waiting { crowd: Arc::clone(self), peer })
    }

    /// Counts a copy of so many bytes between this GPU and that one of the peer's.
    pub(crate) fn begin(self: &Arc<Self>, peer: Uuid, len: u64) -> UnderWay {
        let turns = &mut *locked(&self.turns);
        let found = turns.peer(peer);
        (found.under_way, found.bytes) = (found.under_way + 1, found.bytes + len);
        if turns.current == Some(peer) {
            turns.bytes += len;
        }
        UnderWay { crowd: Arc::clone(self), peer, len }
    }

    /// How many blocks of the kernel are to write to that peer; `None`: the copy engine is to.
    pub(crate) fn blocks(&self, peer: &Uuid) -> Option<u32> {
        let turns = locked(&self.turns);
        let others = turns.peers.iter().filter(|other| other.name != *peer && other.under_way > 0).count();
        let by_kernel = match self.way {
            GpuCopy::Engine => false,
            GpuCopy::Kernel => true,
            GpuCopy::Auto => others > 0,
        };
        by_kernel.then(|| (BLOCKS / (others as u32 + 1)).clamp(LEAST_BLOCKS, MOST_BLOCKS))
    }

    /// Whether the kernels may soon be needed.
    fn is_foreseen(&self) -> bool {
        match self.way {
            GpuCopy::Engine => false,
            GpuCopy::Kernel => true,
            GpuCopy::Auto => locked(&self.turns).peers.len() > 1,
        }
    }

    /// The kernels, if they are there: nobody waits for a compiler. They are loaded on a thread of its own once there are two
    /// peers to write to, unless a stream waits: loading may not return while one does.
    pub(crate) fn kernels(&self, context: &Context) -> Option<&Arc<Kernels>> {
        if let Some(loaded) = self.kernels.get() {
            return loaded.as_ref().ok();
        }
        let mut loading = locked(&self.loading);
        if loading.is_none() && self.is_foreseen() && !context.a_stream_waits() {
            let (context, settings, place) = (context.clone(), self.settings.clone(), Arc::clone(&self.kernels));
            let load = move || {
                let _relaxed = context.device().cuda().relaxed();
                let kernels = crossrail_kernels::shared(&context, &settings, settings.timeout);
                let _ = place.set(kernels.map_err(|error| error.to_string()));
            };
            let thread = std::thread::Builder::new().name("crossrail-kernels".into()).spawn(load);
            match thread {
                Ok(thread) => *loading = Some(thread),
                Err(error) => _ = self.kernels.set(Err(format!("no thread to load kernels: {error}"))),
            }
        }
        None
    }

    /// Why there are no kernels, where there cannot be any.
    pub(crate) fn why_no_kernels(&self) -> Option<String> {
        self.kernels.get().and_then(|loaded| loaded.as_ref().err().cloned())
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let thread = self.loading.get_mut().ok().and_then(Option::take);
        // A process must not end while a compiler runs in it.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const PEERS: [Uuid; 3] = [[1; 16], [2; 16], [3; 16]];
    const LEN: u64 = 64 << 20;

    /// Of the GPU 0.
    fn crowd(way: &str) -> Arc<Crowd> {
        let settings = Settings::from_pairs([("CROSSRAIL_GPU_COPY", way)]).expect("a setting");
        Arc::new(Crowd::new([0; 16], &settings))
    }

    #[test]
    fn the_engine_copies_to_one_peer_and_the_kernel_to_several() {
        let crowd = crowd("auto");
        assert_eq!((crowd.blocks(&PEERS[0]), crowd.is_foreseen()), (None, false));
        assert!(crowd.wait(PEERS[0]).is_none(), "nobody takes turns");
        let first = [crowd.begin(PEERS[0], LEN), crowd.begin(PEERS[0], LEN)];
        assert_eq!((crowd.blocks(&PEERS[0]), crowd.is_foreseen()), (None, false), "one peer, however many copies");
        assert_eq!(crowd.blocks(&PEERS[1]), Some(32));
        let second = crowd.begin(PEERS[1], LEN);
        assert_eq!((crowd.blocks(&PEERS[0]), crowd.is_foreseen()), (Some(32), true));
        assert_eq!(crowd.blocks(&PEERS[2]), Some(21));
        drop(first);
        assert_eq!(crowd.blocks(&PEERS[1]), None, "the others have ended");
        drop(second);
        assert!(crowd.is_foreseen(), "as before, so again");
    }

    #[test]
    fn either_can_be_asked_for() {
        let (engine, kernel) = (crowd("engine"), crowd("kernel"));
        let _under_way = [engine.begin(PEERS[0], 1), engine.begin(PEERS[1], 1), kernel.begin(PEERS[0], 1)];
        assert_eq!((engine.blocks(&PEERS[2]), engine.is_foreseen()), (None, false));
        assert_eq!((kernel.blocks(&PEERS[0]), kernel.is_foreseen()), (Some(32), true));
        let _more: Vec<UnderWay> = (10..40).map(|number| kernel.begin([number; 16], 1)).collect();
        assert_eq!(kernel.blocks(&PEERS[0]), Some(8), "with many peers, a few for each");
    }

    /// Begins what may begin of `waiting`, as often as passes would; ends the oldest copy when nothing may. Returns the peers
    /// in the order in which their copies began.
    fn carried(crowd: &Arc<Crowd>, mut waiting: Vec<Waiting>, len: u64, before: Option<UnderWay>) -> Vec<u8> {
        let (mut begun, mut under_way) = (Vec::new(), VecDeque::from_iter(before));
        while !waiting.is_empty() {
            match waiting.iter().position(Waiting::may_begin) {
                Some(at) => {
                    let next = waiting.remove(at);
                    under_way.push_back(crowd.begin(next.peer, len));
                    begun.push(next.peer[0]);
                }
                None => drop(under_way.pop_front().expect("something may always begin, or is under way")),
            }
            let alone = waiting.windows(2).all(|two| two[0].peer == two[1].peer);
            assert!(alone || under_way.len() <= 2 || under_way.len() as u64 * len <= AHEAD + len);
        }
        begun
    }

    fn waiting(crowd: &Arc<Crowd>, peers: &[u8]) -> Vec<Waiting> {
        peers.iter().filter_map(|peer| crowd.wait([*peer; 16])).collect()
    }

    #[test]
    fn one_peer_gets_all_its_copies_after_the_other_beginning_with_the_next() {
        let engine = crowd("engine");
        let order = carried(&engine, waiting(&engine, &[3, 1, 2, 3, 1, 2, 1]), LEN, None);
        assert_eq!(order, [1, 1, 1, 2, 2, 3, 3]);
        assert_eq!(locked(&engine.turns).current, None, "all is over");
        // One copy was begun before it was known what else there is.
        let mut early = waiting(&engine, &[2]);
        assert!(early[0].may_begin());
        let begun = engine.begin(PEERS[1], LEN);
        early.clear();
        let rest = waiting(&engine, &[3, 2, 1, 1]);
        assert_eq!(carried(&engine, rest, LEN, Some(begun)), [1, 1, 2, 3]);
        let third = Arc::new(Crowd::new([2; 16], &engine.settings));
        assert_eq!(carried(&third, waiting(&third, &[0, 1, 3, 0, 3]), LEN, None), [3, 3, 0, 0, 1]);
    }

    #[test]
    fn one_peer_alone_waits_for_nobody_and_none_waits_for_ever() {
        let engine = crowd("engine");
        let all = waiting(&engine, &[1; 40]);
        assert!(all.iter().all(Waiting::may_begin));
        drop(all);
        let mut peers = [1; 40];
        peers[39] = 2;
        let order = carried(&engine, waiting(&engine, &peers), 256 << 20, None);
        assert_eq!(order.iter().position(|peer| *peer == 2), Some(8), "after as much as a turn has");
        let cancelled = waiting(&engine, &[1, 2]);
        assert!(cancelled[0].may_begin() && !cancelled[1].may_begin());
        drop(cancelled);
        assert!(waiting(&engine, &[2])[0].may_begin(), "what waited and is gone has no turn");
    }
}
