//! Bounds of the memory that peers can take, over any number of connections; bytes that a first frame may carry.

use proto::Regions as _;

use super::*;
use crate::memory::Buffer;

const MOST: u64 = 1 << 20;

struct Worker {
    regions: Regions,
    hosted: Hosted,
    next: u32,
}

impl Worker {
    fn new() -> Worker {
        Worker { regions: Regions::default(), hosted: Hosted { notices_max: MOST, ..Hosted::default() }, next: 0 }
    }

    fn connect(&mut self, name: &str) -> EndpointId {
        let endpoint = EndpointId(self.next);
        self.next += 1;
        self.hosted.begin(endpoint, name, u64::from(endpoint.0) + 1);
        endpoint
    }

    /// Delivers a mail; false if it was refused.
    fn mail(&mut self, endpoint: EndpointId, (sort, id): (Sort, u32), bytes: &[u8]) -> bool {
        let mut shown = Shown { regions: &self.regions, hosted: &mut self.hosted, endpoint };
        let key = Named::Mail { sort, id }.key();
        let Ok(region) = shown.resolve(&key, 0, bytes.len() as u64, Access::Write) else { return false };
        let Some(Where::Flat(at, _)) = self.hosted.memory(region) else { panic!("a mail has memory") };
        // SAFETY: the mail's memory, of that length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        self.hosted.arrived(&self.regions, region);
        self.hosted.released(region);
        true
    }

    /// Fills a connection's notices. Their bytes.
    fn fill(&mut self, endpoint: EndpointId) -> u64 {
        let notice = [7; 100 << 10];
        let mut sent = 0;
        while self.mail(endpoint, (Sort::Notice, 0), &notice) {
            sent += notice.len() as u64;
        }
        sent
    }

    fn queued(&self) -> u64 {
        self.hosted.raised.iter().map(|raised| raised.bytes.len() as u64).sum()
    }
}

#[test]
fn notices_of_a_peer_that_leaves_and_comes_again_stay_bounded() {
    for same_name in [true, false] {
        let mut worker = Worker::new();
        for time in 0..100 {
            let name = if same_name { "peer".to_owned() } else { format!("peer {time}") };
            let endpoint = worker.connect(&name);
            worker.fill(endpoint);
            worker.hosted.forget(endpoint);
        }
        let most = if same_name { 2 * MOST } else { NOTICES_PEERS * MOST };
        assert!(worker.queued() > most / 3 && worker.queued() <= most, "{} bytes", worker.queued());
        if same_name {
            let other = worker.connect("another");
            assert!(worker.fill(other) > MOST / 2, "others have room");
        }
        while worker.hosted.take_notice().is_some() {}
        let again = worker.connect("peer");
        assert!(worker.fill(again) > MOST / 2, "what was taken counts no more");
        worker.hosted.forget(again);
        while worker.hosted.take_notice().is_some() {}
        assert_eq!((worker.hosted.totals.notices.bytes(), worker.hosted.left.of("peer")), (0, 0));
    }
}

#[test]
fn notices_know_their_sender_after_its_connection() {
    let mut worker = Worker::new();
    for name in ["one", "another"] {
        let endpoint = worker.connect(name);
        assert!(worker.mail(endpoint, (Sort::Notice, 0), b"notice"));
        worker.hosted.forget(endpoint);
    }
    for (endpoint, name) in [(0, "one"), (1, "another")] {
        let from = worker.hosted.take_notice().expect("a notice").from;
        assert_eq!((from.endpoint.0, &*from.name, from.generation), (endpoint, name, u64::from(endpoint) + 1));
    }
}

#[test]
fn the_credit_of_a_refused_notice_returns() {
    let mut worker = Worker::new();
    let endpoint = worker.connect("peer");
    let resolve = |worker: &mut Worker, named: Named, len: u64| {
        let mut shown = Shown { regions: &worker.regions, hosted: &mut worker.hosted, endpoint };
        shown.resolve(&named.key(), 0, len, Access::Write)
    };
    let notice = 200 << 10;
    // An unknown view, as after a deregistration of which the writer was not notified yet.
    let put = Named::Put { id: 3, notice };
    assert_eq!(resolve(&mut worker, put, PUT_AHEAD as u64 + u64::from(notice) + 8), Err(RegionFault::Gone));
    assert_eq!(worker.hosted.take_refused(), [endpoint]);
    assert_eq!(worker.hosted.credit_due(endpoint), Some(u64::from(notice) + NOTICE_EXTRA));
    // Not more than was sent.
    assert!(resolve(&mut worker, put, PUT_AHEAD as u64).is_err());
    let long = Named::Mail { sort: Sort::Notice, id: 0 };
    assert_eq!(resolve(&mut worker, long, NOTICE_MAX as u64 + 1), Err(RegionFault::Full));
    assert!(worker.hosted.take_refused().is_empty() && worker.hosted.credit_due(endpoint).is_none());
}

#[test]
fn notices_of_a_hundred_connections_stay_bounded() {
    let mut worker = Worker::new();
    let all: Vec<_> = (0..100).map(|_| worker.connect("peer")).collect();
    all.iter().for_each(|endpoint| _ = worker.fill(*endpoint));
    assert!(worker.queued() <= NOTICES_PEERS * MOST);
}

#[test]
fn lists_and_mails_of_a_hundred_connections_stay_bounded() {
    let mut worker = Worker::new();
    let (_, known) = worker.regions.insert(Buffer::from(vec![0; 64]), [1; 16]);
    let strides = vec![RegionStride { region: 0, stride: Stride { at: 0, len: 8, stride: 8, count: 8 } }; 1000];
    let rows = wire::put_rows(&[known.key], &strides);
    // As if others had most of what there is.
    worker.hosted.totals.lists.add(ALL_LISTS_MAX - 20 * wire::rows_weight(&rows));
    let all: Vec<_> = (0..100).map(|_| worker.connect("peer")).collect();
    all.iter().for_each(|endpoint| assert!(worker.mail(*endpoint, (Sort::Rows, 1), &rows)));
    let held = |worker: &Worker| worker.hosted.peers.values().filter(|peer| !peer.rows.is_empty()).count();
    assert_eq!(held(&worker), 20);
    all.iter().take(50).for_each(|endpoint| worker.hosted.forget(*endpoint));
    all.iter().skip(50).for_each(|endpoint| assert!(worker.mail(*endpoint, (Sort::Rows, 1), &rows)));
    assert_eq!(held(&worker), 20, "those that ended make room");
    worker.hosted.totals.mails.add(wire::ALL_MAILS_MAX - 10);
    assert!(!worker.mail(all[99], (Sort::Rows, 2), &rows));
}

#[cfg(feature = "simulated-gpu")]
mod on_gpus {
    use crossrail_gpu::Devices;
    use crossrail_shm::Arena;
    use crossrail_types::Settings;
    use proto::Regions as _;

    use crossrail_transport::Index;

    use super::super::*;
    use crate::memory::{Buffer, GpuTimes, Keep, OnGpu};

    const PEER: EndpointId = EndpointId(0);
    const LEN: usize = 64;

    fn shown<'a>(regions: &'a Regions, hosted: &'a mut Hosted) -> Shown<'a> {
        Shown { regions, hosted, endpoint: PEER }
    }

    fn mail(regions: &Regions, hosted: &mut Hosted, (sort, id): (Sort, u32), bytes: &[u8]) {
        let key = Named::Mail { sort, id }.key();
        let region = shown(regions, hosted).resolve(&key, 0, bytes.len() as u64, Access::Write).expect("a mail");
        assert!(shown(regions, hosted).eager(region));
        let Some(Where::Flat(at, _)) = hosted.memory(region) else { panic!("a mail has memory") };
        // SAFETY: the mail's memory, of that length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        hosted.arrived(regions, region);
        hosted.released(region);
    }

    /// A frame must not be read from memory other than the host's, for any request of a peer.
    #[test]
    fn rows_of_gpu_memory_go_in_chunks_alone() {
        let gpus = Devices::simulated(&Settings::default(), Arena::new(), 1);
        let memory = gpus.alloc(0, LEN).expect("a simulated GPU");
        let device = Some(gpus.device(0).expect("a simulated GPU"));
        let on_gpu = OnGpu { ordinal: 0, device, after: None, times: GpuTimes::default() };
        let on_gpu =
            Buffer { ptr: memory.ptr() as *mut u8, len: LEN, keep: Keep::Nothing, gpu: Some(Box::new(on_gpu)) };
        let (mut regions, mut hosted) = (Regions::default(), Hosted::default());
        hosted.begin(PEER, "peer", 0);
        for (id, buffer, eager) in [(1, Buffer::from(vec![0; LEN]), true), (2, on_gpu, false)] {
            let (region, known) = regions.insert(buffer, [id as u8; 16]);
            assert_eq!(shown(&regions, &mut hosted).eager(region), eager);
            let stride = RegionStride { region: 0, stride: Stride { at: 0, len: 8, stride: 16, count: 4 } };
            mail(&regions, &mut hosted, (Sort::Rows, id), &wire::put_rows(&[known.key], &[stride]));
            let view = wire::put_view(&wire::ViewOf { rows: id, index: Index::All, theirs: None });
            mail(&regions, &mut hosted, (Sort::View, id), &view);
            let key = Named::View { id, behind: None, counts: false }.key();
            let access = shown(&regions, &mut hosted).resolve(&key, 0, 8, Access::Read).expect("a view");
            assert_eq!(shown(&regions, &mut hosted).eager(access), eager, "rows of view {id}");
        }
    }
}
