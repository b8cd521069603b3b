//! The workers of a network, which move its data.
//!
//! NCCL calls from one thread, which is to move no data itself: one thread copies some 5 GB/s through sockets, and a
//! worker has one lock. Each of several workers therefore has connections, a lock and a thread of its own, which polls
//! while there is traffic, and the messages of a communicator take turns between the workers.

use std::net::SocketAddr;
use std::thread::available_parallelism;
use std::time::Duration;

use crossrail::{Context, Endpoint, Turn, Worker, WorkerOptions};
use crossrail_locks::Mutex;
use crossrail_types::{IoThreads, Result};

use crate::handle::MAX_WORKERS;

/// Cores per worker, fewest and most workers, unless the user says otherwise. Even two cores carry more by two workers:
/// while one thread sends, the sockets of the other fill or drain.
const CORES: usize = 4;
const USUAL_MIN: usize = 2;
const USUAL_MAX: usize = 4;
/// How long a worker's thread polls after the last message: longer than a short collective takes, so that none of a
/// series waits for a thread to wake.
const LINGER: Duration = Duration::from_millis(1);
/// Cores from which on a worker's thread starts transfers: with fewer, NCCL's thread would only wait for that one to run.
const HAND_OVER_FROM: usize = 4;
/// Largest message that goes without being asked for: NCCL's pieces of sends and receives. The messages of a worker go
/// over one connection, which each worker has on another rail.
const EAGER_MAX: usize = 128 << 10;

/// How many workers a network has.
pub(crate) fn count(threads: IoThreads) -> usize {
    match threads {
        IoThreads::Count(count) => (count as usize).clamp(1, MAX_WORKERS),
        IoThreads::Auto => usual(available_parallelism().map_or(1, usize::from)),
    }
}

/// Whether the workers' threads start transfers, rather than NCCL's.
pub(crate) fn hand_over() -> bool {
    available_parallelism().is_ok_and(|cores| cores.get() >= HAND_OVER_FROM)
}

/// The place of the worker `index` among so many that are connected to one peer. `hands_over`: they start transfers;
/// where NCCL's thread does, it is not to send long messages itself.
pub(crate) fn turn(index: usize, of: usize, hands_over: bool) -> Turn {
    let eager_max = if hands_over { EAGER_MAX } else { Turn::default().eager_max };
    Turn { index, of, eager_max }
}

fn usual(cores: usize) -> usize {
    (cores / CORES).clamp(USUAL_MIN, USUAL_MAX)
}

/// See the module.
pub(crate) struct Workers {
    seats: Vec<Seat>,
}

struct Seat {
    worker: Worker,
    /// Endpoints that other ranks' workers have made.
    accepted: Mutex<Vec<Endpoint>>,
}

/// The name of a network's worker; the first has the network's.
fn name_of(network: &str, index: usize) -> String {
    if index == 0 { network.to_owned() } else { format!("{network}.{index}") }
}

impl Workers {
    /// Starts `count` workers of the network `name`.
    ///
    /// # Errors
    /// As [`Worker::new`].
    pub(crate) fn start(
        context: &Context,
        count: usize,
        name: &str,
        listen: Option<Vec<SocketAddr>>,
    ) -> Result<Workers> {
        let start = |index| {
            let (name, listen) = (Some(name_of(name, index)), listen.clone());
            let options = WorkerOptions { name, listen, linger: LINGER, ..WorkerOptions::default() };
            Ok(Seat { worker: Worker::new(context, options)?, accepted: Mutex::default() })
        };
        Ok(Workers { seats: (0..count).map(start).collect::<Result<_>>()? })
    }

    pub(crate) fn len(&self) -> usize {
        self.seats.len()
    }

    /// One of the workers; the first for an index beyond the last.
    pub(crate) fn worker(&self, index: usize) -> &Worker {
        &self.seats.get(index).unwrap_or(&self.seats[0]).worker
    }

    /// The network's name.
    pub(crate) fn name(&self) -> String {
        self.worker(0).name()
    }

    /// The port on which each worker accepts.
    pub(crate) fn ports(&self) -> Vec<u16> {
        let port = |seat: &Seat| seat.worker.control_addresses().first().map_or(0, SocketAddr::port);
        self.seats.iter().map(port).collect()
    }

    /// The endpoint that the worker `index` of the network `name` has made to ours of that index; `None`: it is not there
    /// yet.
    pub(crate) fn accepted(&self, index: usize, name: &str) -> Option<Endpoint> {
        let Seat { worker, accepted } = self.seats.get(index)?;
        let mut accepted = accepted.lock();
        while let Ok(endpoint) = worker.accept(Some(Duration::ZERO)) {
            accepted.push(endpoint);
        }
        accepted.retain(Endpoint::is_alive);
        let name = name_of(name, index);
        accepted.iter().find(|endpoint| endpoint.peer() == name).cloned()
    }

    /// Ends the workers: their connections close, their threads end.
    ///
    /// # Errors
    /// `Timeout`: a peer may still access memory; the workers are closed all the same.
    pub(crate) fn close(&self) -> Result<()> {
        let mut ended = Ok(());
        for seat in &self.seats {
            seat.accepted.lock().clear();
            ended = ended.and(seat.worker.close());
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_workers_as_the_cores_or_the_user_allow() {
        assert_eq!([1, 2, 11, 12, 16, 192].map(usual), [2, 2, 2, 3, 4, 4]);
        assert_eq!([1, 3, 256].map(|threads| count(IoThreads::Count(threads))), [1, 3, MAX_WORKERS]);
    }

    #[test]
    fn pieces_go_unasked_by_the_workers_threads() {
        assert_eq!(turn(1, 4, true), Turn { index: 1, of: 4, eager_max: EAGER_MAX });
        assert_eq!(turn(0, 1, false), Turn::default());
    }
}
