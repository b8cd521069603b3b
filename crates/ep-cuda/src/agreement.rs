//! Agreement with the other ranks on the active ranks, and the masks that kernels read. Shared by a buffer and its
//! variants, and outside their states, whose locks may be held by callers that wait for kernels.
//!
//! A loss reported by kernels or by a closed connection is proposed at the next call, or at once by the watching
//! thread, which also handles notices of other ranks. Without losses, operations read only two atomic words.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use crossrail::{Endpoint, Receipt, Request, Worker};
use crossrail_ep::view::View;
use crossrail_ep::{OnLoss, notices};
use crossrail_locks::Mutex;
use crossrail_types::Result;

use crate::connection_event::ConnectionEvent;
use crate::heap::Heap;

/// See the module.
pub(crate) struct Agreement {
    me: u32,
    /// Mask lost ranks in agreement with the others. Otherwise the caller decides.
    masks_lost: bool,
    /// The heap of this rank, for its masks.
    heap: Arc<Heap>,
    worker: Worker,
    events: Sender<ConnectionEvent>,
    /// Operations enqueued so far by the host: equal on all ranks, or replayed by graphs on all ranks.
    operations: AtomicU64,
    /// Length of `Agreed::losses`.
    losses: AtomicUsize,
    is_evicted: AtomicBool,
    agreed: Mutex<Agreed>,
}

struct Agreed {
    view: View,
    /// By rank.
    contacts: Vec<Option<Contact>>,
    /// Ranks removed from the view, in order.
    losses: Vec<Loss>,
}

/// A connected rank.
struct Contact {
    endpoint: Endpoint,
    /// Number of its connection.
    generation: u64,
    /// Receives its next notice.
    inbox: Option<Request>,
    /// It was removed from the view, so its epochs differ from the others'.
    is_out_of_sync: bool,
}

/// A rank that is out of the view.
#[derive(Clone, Debug)]
pub(crate) struct Loss {
    pub(crate) rank: u32,
    /// Number of its connection.
    pub(crate) generation: u64,
    pub(crate) why: String,
}

impl Agreement {
    /// The agreement of rank `me` of `ranks`, without connections. Arrived notices are announced to `events`, for
    /// [`Agreement::handle_notice`].
    pub(crate) fn new(
        me: u32,
        ranks: u32,
        on_loss: OnLoss,
        heap: Arc<Heap>,
        worker: Worker,
        events: Sender<ConnectionEvent>,
    ) -> Agreement {
        let contacts = (0..ranks).map(|_| None).collect();
        Agreement {
            me,
            masks_lost: on_loss == OnLoss::Mask,
            heap,
            worker,
            events,
            operations: AtomicU64::new(0),
            losses: AtomicUsize::new(0),
            is_evicted: AtomicBool::new(false),
            agreed: Mutex::new(Agreed { view: View::new(me), contacts, losses: Vec::new() }),
        }
    }

    /// An operation was enqueued.
    pub(crate) fn operation_begun(&self) {
        self.operations.fetch_add(1, Ordering::Relaxed);
    }

    /// Operations enqueued so far, and the number of the view, to be sent to a rank that connects.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.operations.load(Ordering::Relaxed), self.number())
    }

    /// Number of the view.
    pub(crate) fn number(&self) -> u64 {
        self.agreed.lock().view.number()
    }

    /// These ranks, with the numbers of their connections, are connected from now on; `active` take part. `progress`: the
    /// greatest of the new ranks'. A rank that was connected to nobody else begins anew.
    pub(crate) fn connected(&self, new: Vec<(u32, u64, Endpoint)>, active: &[u32], progress: (u64, u64)) -> Result<()> {
        let mut agreed = self.agreed.lock();
        if agreed.contacts.iter().all(Option::is_none) {
            agreed.view = View::new(self.me);
            self.is_evicted.store(false, Ordering::Release);
        }
        self.operations.fetch_max(progress.0, Ordering::Relaxed);
        let ranks: Vec<u32> = new.iter().map(|(rank, ..)| *rank).collect();
        for (rank, generation, endpoint) in new {
            agreed.contacts[rank as usize] = Some(Contact { endpoint, generation, inbox: None, is_out_of_sync: false });
        }
        self.restart_in(&mut agreed, active, progress.1);
        // Only now do their notices count.
        ranks.into_iter().try_for_each(|rank| self.listen(&mut agreed, rank))
    }

    /// These ranks are not connected any more; `active` take part.
    pub(crate) fn disconnected(&self, ranks: &[u32], active: &[u32]) {
        let mut agreed = self.agreed.lock();
        for rank in ranks {
            if let Some(inbox) = agreed.contacts[*rank as usize].take().and_then(|contact| contact.inbox) {
                inbox.cancel();
            }
        }
        self.restart_in(&mut agreed, active, 0);
    }

    /// The caller has changed who takes part, on all ranks at the same point between operations.
    pub(crate) fn restart(&self, active: &[u32]) {
        self.restart_in(&mut self.agreed.lock(), active, 0);
    }

    fn restart_in(&self, agreed: &mut Agreed, active: &[u32], number: u64) {
        agreed.view.restart(active.iter().copied(), self.operations.load(Ordering::Relaxed), number);
    }

    /// Receives the next notice of a rank.
    fn listen(&self, agreed: &mut Agreed, rank: u32) -> Result<()> {
        let Some(contact) = agreed.contacts[rank as usize].as_mut().filter(|_| self.masks_lost) else { return Ok(()) };
        let (events, generation) = (self.events.clone(), contact.generation);
        let inbox = notices::receive(&self.worker, &contact.endpoint)?;
        inbox.on_complete(move |came| {
            // A failure is the end of the connection, which is announced elsewhere; or there is no buffer any more.
            let _ = came.map(|receipt| events.send(ConnectionEvent::Notice { rank, generation, receipt }));
        });
        contact.inbox = Some(inbox);
        Ok(())
    }

    /// Removes `rank`, which this rank has lost, from the view. Masks it and every rank removed with it, and notifies
    /// the others.
    ///
    /// # Errors
    /// What the driver reports.
    pub(crate) fn lose(&self, rank: u32, why: &str) -> Result<()> {
        if !self.masks_lost {
            return Ok(());
        }
        let mut agreed = self.agreed.lock();
        let was_out = agreed.view.out().contains(&rank);
        let mut out = agreed.view.lose(rank, why);
        if !was_out && agreed.view.out().contains(&rank) {
            out.insert(0, rank);
        }
        self.follow(&mut agreed, &out)
    }

    /// Handles the notice that has arrived over that connection.
    ///
    /// # Errors
    /// `Protocol` for a malformed notice; errors of the driver.
    pub(crate) fn handle_notice(&self, rank: u32, generation: u64, receipt: &Receipt) -> Result<()> {
        let mut agreed = self.agreed.lock();
        let contact = agreed.contacts[rank as usize].as_mut().filter(|contact| contact.generation == generation);
        let Some(inbox) = contact.and_then(|contact| contact.inbox.take()) else { return Ok(()) };
        let notice = notices::received(inbox, receipt);
        // The connection may have ended since, which is noticed elsewhere.
        let _ = self.listen(&mut agreed, rank);
        let out = agreed.view.handle_notice(rank, notice?);
        if agreed.view.evicted().is_some() {
            // Kernels in flight wait for nobody any more.
            let mut others = (0..agreed.contacts.len() as u32).filter(|rank| *rank != self.me);
            let masked = others.try_for_each(|rank| self.heap.set_mask(rank, true));
            self.is_evicted.store(true, Ordering::Release);
            return masked;
        }
        self.follow(&mut agreed, &out)
    }

    /// Masks ranks that were removed from the view, also for kernels in flight, and notifies the others.
    fn follow(&self, agreed: &mut Agreed, out: &[u32]) -> Result<()> {
        let why = agreed.view.why().to_owned();
        for rank in out {
            let generation = agreed.contacts[*rank as usize].as_mut().map_or(0, |contact| {
                contact.is_out_of_sync = true;
                contact.generation
            });
            agreed.losses.push(Loss { rank: *rank, generation, why: why.clone() });
        }
        let masked = out.iter().try_for_each(|rank| self.heap.set_mask(*rank, true));
        self.losses.store(agreed.losses.len(), Ordering::Release);
        if !out.is_empty() {
            let endpoints = agreed.contacts.iter().flatten().map(|contact| &contact.endpoint);
            notices::send(&agreed.view, self.operations.load(Ordering::Relaxed), endpoints);
        }
        masked
    }

    /// Ranks removed since the last call with this counter.
    pub(crate) fn losses_since(&self, seen: &mut usize) -> Vec<Loss> {
        if self.losses.load(Ordering::Acquire) == *seen {
            return Vec::new();
        }
        let agreed = self.agreed.lock();
        let new = agreed.losses[*seen..].to_vec();
        *seen = agreed.losses.len();
        new
    }

    /// Why the connection to a rank has ended; `None` while it is open.
    pub(crate) fn end_of(&self, rank: u32) -> Option<String> {
        self.agreed.lock().contacts[rank as usize].as_ref().and_then(|contact| contact.endpoint.end())
    }

    /// Whether this rank is evicted.
    pub(crate) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Acquire)
    }

    /// Fails if this rank is evicted.
    pub(crate) fn refuse_evicted(&self, operation: &str) -> Result<()> {
        if !self.is_evicted() {
            return Ok(());
        }
        let agreed = self.agreed.lock();
        agreed.view.evicted().map_or(Ok(()), |why| Err(notices::evicted(operation, why)))
    }

    /// Those of `ranks` that can only rejoin over a new connection, because epochs differ: the others have continued
    /// without them or, if this rank is evicted, without it.
    pub(crate) fn out_of_sync(&self, ranks: &[u32]) -> Vec<u32> {
        let agreed = self.agreed.lock();
        let evicted = agreed.view.evicted().is_some();
        let out_of_sync =
            |rank: u32| agreed.contacts[rank as usize].as_ref().is_some_and(|contact| contact.is_out_of_sync);
        ranks.iter().copied().filter(|rank| evicted || out_of_sync(*rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::thread;
    use std::time::Duration;

    use crossrail::{ConnectOptions, Context, Settings, WorkerOptions};
    use crossrail_ep::{Config, Layout, Payload};
    use crossrail_types::ErrorKind;

    use super::*;
    use crate::options::{DeviceOptions, shape};

    const LIMIT: Duration = Duration::from_secs(60);
    const WHY: &str = "nothing came for 1.000 s";

    /// A rank whose heap is in host memory, which is written in the same way.
    struct Rank {
        agreement: Arc<Agreement>,
        heap: Arc<Heap>,
        worker: Worker,
        /// By rank.
        endpoints: Vec<Option<Endpoint>>,
    }

    impl Rank {
        fn masks(&self) -> Vec<u8> {
            self.heap.masks().into_iter().map(u8::from).collect()
        }

        /// Connects to all ranks, as connection `generation`.
        fn join(&self, generation: u64) {
            let ends = self.endpoints.iter().enumerate();
            let new = ends.filter_map(|(rank, end)| Some((rank as u32, generation, end.clone()?))).collect();
            let all: Vec<u32> = (0..self.endpoints.len() as u32).collect();
            self.agreement.connected(new, &all, (0, 1)).unwrap();
        }
    }

    /// Ranks that are connected to each other. A message announces to one of them what another one knows.
    fn ranks(count: u32, on_loss: OnLoss) -> (Vec<Rank>, Receiver<()>) {
        let config = Config {
            ranks: count,
            max_tokens: 5,
            hidden: 256,
            experts: 2 * count as usize,
            topk: 2,
            payload: Payload::Bf16,
            layouts: vec![Layout::Expert],
            prereduce: false,
            share_node: true,
            timeout: LIMIT,
            on_loss,
        };
        let shape = shape(&config, &DeviceOptions::default()).unwrap();
        let context = Context::new(Settings::default()).unwrap();
        let (heard, all_heard) = channel();
        let mut made: Vec<Rank> = Vec::new();
        for me in 0..count {
            let memory = context.alloc(usize::try_from(crate::heap::bytes(&shape)).unwrap()).unwrap();
            let heap = Arc::new(Heap::new(memory, &shape, &shape, 0).unwrap());
            let worker = Worker::new(&context, WorkerOptions::default()).unwrap();
            let (events, arriving) = channel();
            let agreement = Arc::new(Agreement::new(me, count, on_loss, heap.clone(), worker.clone(), events));
            let (hears, heard) = (Arc::downgrade(&agreement), heard.clone());
            thread::spawn(move || {
                while let Ok(ConnectionEvent::Notice { rank, generation, receipt }) = arriving.recv() {
                    let Some(agreement) = hears.upgrade() else { return };
                    agreement.handle_notice(rank, generation, &receipt).unwrap();
                    let _ = heard.send(());
                }
            });
            made.push(Rank { agreement, heap, worker, endpoints: (0..count).map(|_| None).collect() });
        }
        for one in 0..made.len() {
            for other in 0..one {
                let (there, options) = (made[other].worker.address(), ConnectOptions::default());
                made[one].endpoints[other] = Some(made[one].worker.connect(&there, &options).unwrap());
                made[other].endpoints[one] = Some(made[other].worker.accept(Some(LIMIT)).unwrap());
            }
        }
        made.iter().for_each(|rank| rank.join(1));
        (made, all_heard)
    }

    /// Waits until the messages that ranks have received make this true.
    fn until(heard: &Receiver<()>, holds: impl Fn() -> bool) {
        while !holds() {
            heard.recv_timeout(LIMIT).expect("notices that make it true");
        }
    }

    #[test]
    fn survivors_mask_whom_one_of_them_has_lost_and_that_rank_stops() {
        let (ranks, heard) = ranks(4, OnLoss::Mask);
        assert!(ranks.iter().all(|rank| rank.agreement.number() == ranks[0].agreement.number()));
        let before = ranks[0].agreement.number();
        ranks[1].agreement.operation_begun();
        ranks[1].agreement.lose(3, WHY).unwrap();
        assert_eq!(ranks[1].masks(), [0, 0, 0, 1]);
        until(&heard, || {
            (0..3).all(|me| ranks[me].agreement.number() == before + 1) && ranks[3].agreement.is_evicted()
        });
        assert!((0..3).all(|me| ranks[me].masks() == [0, 0, 0, 1]));
        // Each buffer and variant takes note of it once.
        for me in [0, 2] {
            let mut seen = 0;
            let losses = ranks[me].agreement.losses_since(&mut seen);
            assert_eq!(losses.iter().map(|loss| (loss.rank, loss.generation)).collect::<Vec<_>>(), [(3, 1)]);
            assert!(losses[0].why.contains(WHY), "{losses:?}");
            assert!(ranks[me].agreement.losses_since(&mut seen).is_empty());
            ranks[me].agreement.refuse_evicted("dispatch").unwrap();
        }
        assert_eq!(ranks[3].masks(), [1, 1, 1, 0], "its kernels wait for nobody");
        let error = ranks[3].agreement.refuse_evicted("dispatch").unwrap_err();
        assert_eq!(error.kind, ErrorKind::PeerDead);
        assert!(error.detail.contains("rank 3 is out of view") && error.detail.contains(WHY), "{error}");
        assert!(error.hint.is_some_and(|hint| hint.contains("disconnect")));
        // Whatever the caller masks and unmasks in between.
        ranks[0].agreement.restart(&[0, 1, 2]);
        assert_eq!((ranks[0].agreement.out_of_sync(&[1, 3]), ranks[3].agreement.out_of_sync(&[1])), (vec![3], vec![1]));
        // It comes back by new connections, which all ranks make at the same point.
        ranks[3].agreement.disconnected(&[0, 1, 2], &[3]);
        (0..3).for_each(|me| ranks[me].agreement.disconnected(&[3], &[0, 1, 2]));
        ranks.iter().for_each(|rank| rank.join(2));
        assert!(ranks.iter().all(|rank| rank.agreement.refuse_evicted("dispatch").is_ok()));
        assert!(ranks.iter().all(|rank| rank.agreement.out_of_sync(&[0, 1, 2, 3]).is_empty()));
    }

    #[test]
    fn of_two_ranks_that_lose_each_other_the_leader_keeps_one() {
        let (ranks, heard) = ranks(4, OnLoss::Mask);
        ranks[2].agreement.lose(3, WHY).unwrap();
        ranks[3].agreement.lose(2, WHY).unwrap();
        let evicted = || (0..4).filter(|me| ranks[*me].agreement.is_evicted()).collect::<Vec<_>>();
        let out = |out: usize| (0..4).map(|rank| u8::from(rank == out)).collect::<Vec<_>>();
        until(&heard, || {
            evicted().first().is_some_and(|gone| (0..4).all(|me| me == *gone || ranks[me].masks() == out(*gone)))
        });
        let gone = evicted();
        assert!(gone == [2] || gone == [3], "{gone:?}");
        let numbers: Vec<u64> = (0..4).filter(|me| *me != gone[0]).map(|me| ranks[me].agreement.number()).collect();
        assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
    }

    #[test]
    fn without_masks_the_caller_decides() {
        let (ranks, heard) = ranks(3, OnLoss::Raise);
        let number = ranks[0].agreement.number();
        ranks[0].agreement.lose(2, WHY).unwrap();
        assert!(ranks[0].agreement.losses_since(&mut 0).is_empty());
        assert!(ranks.iter().all(|rank| rank.masks() == [0, 0, 0] && rank.agreement.number() == number));
        assert!(heard.try_recv().is_err());
    }
}
