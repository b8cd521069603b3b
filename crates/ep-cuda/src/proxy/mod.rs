//! The proxy of a buffer with ranks on other nodes: threads that send the data that kernels write for those ranks, and
//! announce to kernels the data that has arrived from them.
//!
//! ```text
//! kernel -> send area, in pinned memory          kernel <- receive area, in pinned memory
//!        -> command, in a ring                          <- flags, tags and words, stored by the proxy
//! proxy  -> rails: the range, and a note         proxy  <- rails: both have arrived
//! ```
//!
//! There are several lanes to each far rank, each with a ring and rails of its own, so that several processors copy; a
//! thread drives one or more. Nothing here waits for a rank, and no lock is held that callers hold.

pub(crate) mod area;
mod incoming;
mod link;
mod outgoing;
mod ring;
mod shared;
mod sight;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod turns;
mod worker;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use crossrail_cuda::Context;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Result};

pub(crate) use self::area::Area;
pub(crate) use self::link::{Link, Offer};
pub(crate) use self::ring::Ring;
pub(crate) use self::shared::{FarRank, set_taken};
pub(crate) use self::sight::Window;
use self::worker::Lane;

/// Maximum time that a thread takes to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Most lanes to a far rank.
const MOST_LANES: usize = 8;
// One message has the targets of all of them.
const _: () = assert!(MOST_LANES * Offer::TARGETS + 256 <= crossrail_ep::hello::MAX_MESSAGE);

/// Lanes to each far rank; the same on every rank.
pub(crate) fn lanes(ranks: u32) -> usize {
    match ranks {
        ..=4 => MOST_LANES,
        5..=16 => 4,
        17..=32 => 2,
        _ => 1,
    }
}

/// Number of threads for that number of lanes: several ranks share a host, and each thread may poll.
pub(crate) fn threads(lanes: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 4).clamp(1, lanes)
}

/// Reports that a far rank cannot be reached any more: its number, the generation of its connection, and why.
pub(crate) type Lost = Box<dyn Fn(u32, u64, &str) + Send + Sync>;

/// State shared by the threads.
pub(crate) struct Common {
    ending: AtomicBool,
    /// A graph was captured: its replays involve no call.
    graphs: AtomicBool,
    /// By thread.
    bells: Vec<Bell>,
    lost: Lost,
    window: Window,
}

#[derive(Default)]
struct Bell {
    thread: OnceLock<Thread>,
    /// Rung since the thread looked.
    rung: AtomicBool,
    /// By lane.
    changes: Mutex<Vec<(usize, Change)>>,
}

enum Change {
    Connect(Box<Link>, Sender<()>),
    Disconnect(u32, Sender<()>),
}

/// See the module. Ends with the last clone of what owns it.
pub(crate) struct Proxy {
    common: Arc<Common>,
    lanes: usize,
    threads: Vec<JoinHandle<()>>,
}

impl Proxy {
    /// Starts `count` threads, with the rings' memory, one for each lane.
    pub(crate) fn start(rings: &[Area], count: usize, ranks: u32, window: Window, lost: Lost) -> Result<Proxy> {
        let bells = (0..count).map(|_| Bell::default()).collect();
        let (ending, graphs) = (AtomicBool::new(false), AtomicBool::new(false));
        let common = Arc::new(Common { ending, graphs, bells, lost, window });
        let mut proxy = Proxy { common: common.clone(), lanes: rings.len(), threads: Vec::new() };
        for thread in 0..count {
            let lanes = rings.iter().enumerate().skip(thread).step_by(count);
            let lane =
                |number: usize, memory: &Area| Lane::new(Ring::new(memory.clone()), ranks, number, &common.window);
            let lanes = lanes.map(|(number, memory)| (number, lane(number, memory))).collect();
            let common = common.clone();
            let body = move || worker::run_guarded(&common, thread, lanes);
            let builder = std::thread::Builder::new().name(worker::thread_name(thread));
            let handle = builder.spawn(body).map_err(|error| Error::io("ExpertBuffer", "a thread", &error))?;
            proxy.threads.push(handle);
        }
        Ok(proxy)
    }

    /// Memory of the rings, for all lanes.
    pub(crate) fn rings(context: &Context, lanes: usize) -> Result<Vec<Area>> {
        (0..lanes).map(|_| Area::pinned(context, Ring::BYTES)).collect()
    }

    /// An operation was enqueued. `captured`: it may run at any time from now on.
    pub(crate) fn wake(&self, captured: bool) {
        if captured {
            self.common.graphs.store(true, Ordering::Relaxed);
        }
        self.common.bells.iter().for_each(Bell::ring);
    }

    /// From its return on the far rank is reached over these links, one for each lane: a command that is read earlier would
    /// be dropped. `generation`: of its connection.
    ///
    /// # Errors
    /// `Timeout` when a thread does not answer.
    pub(crate) fn connect(&self, links: Vec<Link>, generation: u64) -> Result<()> {
        let Some(far) = links.first().map(|link| link.far().clone()) else { return Ok(()) };
        far.set_generation(generation);
        let mut links = links.into_iter().map(Box::new);
        self.change_all("connect", far.rank, |done| links.next().map(|link| Change::Connect(link, done)))
    }

    /// Lets go of a far rank: its areas are not accessed any more afterwards.
    ///
    /// # Errors
    /// `Timeout` when a thread does not answer.
    pub(crate) fn disconnect(&self, rank: u32) -> Result<()> {
        self.change_all("disconnect", rank, |done| Some(Change::Disconnect(rank, done)))
    }

    /// Waits until each lane has made its change.
    fn change_all(
        &self,
        operation: &str,
        rank: u32,
        mut change: impl FnMut(Sender<()>) -> Option<Change>,
    ) -> Result<()> {
        let (done, answers) = channel();
        let changes = (0..self.lanes).filter_map(|lane| Some((lane, change(done.clone())?)));
        let changed = changes.map(|(lane, change)| self.change(lane, change)).count();
        drop(done);
        for _ in 0..changed {
            if answers.recv_timeout(ANSWER).is_err() {
                let text = format!("a thread of the proxy has not answered for rank {rank} in {} s", ANSWER.as_secs());
                return Err(Error::new(ErrorKind::Timeout, operation, text));
            }
        }
        Ok(())
    }

    fn change(&self, lane: usize, change: Change) {
        let bell = &self.common.bells[lane % self.common.bells.len()];
        bell.changes.lock().push((lane, change));
        bell.ring();
    }
}

impl Bell {
    fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.common.ending.store(true, Ordering::Release);
        self.common.bells.iter().for_each(Bell::ring);
        let me = std::thread::current().id();
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != me) {
            // One that has panicked has ended, too.
            let _ = thread.join();
        }
    }
}
