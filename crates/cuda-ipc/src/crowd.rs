//! Long copies from one GPU to several others at once, and the kernel that then makes them.
//!
//! A GPU's copy engines carry copies to its peers one after the other, whatever streams they are in. Alone, that is the
//! fastest way, and it leaves the multiprocessors to the user. When all GPUs send to all, two of them soon write to the same
//! third, each at half its rate, while another's links are idle: four H200s got 230 to 250 of 395 GB/s (so does a model of
//! four queues whose heads block; sending in turns, or in smaller pieces, is no better unless all begin at the same moment).
//! Kernels write to all at the same time; by bulk copies, 16 blocks together got 326 GB/s, 32 341 and 132 353.

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

/// Who one GPU of this process writes to, and reads from, by long copies.
pub(crate) struct Crowd {
    way: GpuCopy,
    settings: Settings,
    /// The other GPUs, and how many copies are under way between them and this one.
    peers: Mutex<Vec<(Uuid, u32)>>,
    kernels: Arc<OnceLock<Result<Arc<Kernels>, String>>>,
    loading: Mutex<Option<JoinHandle<()>>>,
}

/// A long copy that is under way.
pub(crate) struct UnderWay {
    crowd: Arc<Crowd>,
    peer: Uuid,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some((_, count)) = locked(&self.crowd.peers).iter_mut().find(|(known, _)| *known == self.peer) {
            *count = count.saturating_sub(1);
        }
    }
}

impl Crowd {
    pub(crate) fn new(settings: &Settings) -> Crowd {
        Crowd {
            way: settings.gpu_copy,
            settings: settings.clone(),
            peers: Mutex::default(),
            kernels: Arc::default(),
            loading: Mutex::default(),
        }
    }

    /// Counts a copy between this GPU and that one of the peer's.
    pub(crate) fn begin(self: &Arc<Self>, peer: Uuid) -> UnderWay {
        let mut peers = locked(&self.peers);
        match peers.iter_mut().find(|(known, _)| *known == peer) {
            Some((_, count)) => *count += 1,
            None => peers.push((peer, 1)),
        }
        UnderWay { crowd: Arc::clone(self), peer }
    }

    /// How many blocks of the kernel are to write to that peer; `None`: the copy engine is to.
    pub(crate) fn blocks(&self, peer: &Uuid) -> Option<u32> {
        let peers = locked(&self.peers);
        let others = peers.iter().filter(|(known, count)| known != peer && *count > 0).count();
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
            GpuCopy::Auto => locked(&self.peers).len() > 1,
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
    use super::*;

    const PEERS: [Uuid; 3] = [[1; 16], [2; 16], [3; 16]];

    fn crowd(way: &str) -> Arc<Crowd> {
        let settings = Settings::from_pairs([("CROSSRAIL_GPU_COPY", way)]).expect("a setting");
        Arc::new(Crowd::new(&settings))
    }

    #[test]
    fn the_engine_copies_to_one_peer_and_the_kernel_to_several() {
        let crowd = crowd("auto");
        assert_eq!((crowd.blocks(&PEERS[0]), crowd.is_foreseen()), (None, false));
        let first = [crowd.begin(PEERS[0]), crowd.begin(PEERS[0])];
        assert_eq!((crowd.blocks(&PEERS[0]), crowd.is_foreseen()), (None, false), "one peer, however many copies");
        assert_eq!(crowd.blocks(&PEERS[1]), Some(32));
        let second = crowd.begin(PEERS[1]);
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
        let _under_way = [engine.begin(PEERS[0]), engine.begin(PEERS[1]), kernel.begin(PEERS[0])];
        assert_eq!((engine.blocks(&PEERS[2]), engine.is_foreseen()), (None, false));
        assert_eq!((kernel.blocks(&PEERS[0]), kernel.is_foreseen()), (Some(32), true));
        let _more: Vec<UnderWay> = (10..40).map(|number| kernel.begin([number; 16])).collect();
        assert_eq!(kernel.blocks(&PEERS[0]), Some(8), "with many peers, a few for each");
    }
}
