//! Misuse, and peers that are lost or send what they must not: errors by name, never a crash.

use crossrail::placing::{Imm, Placing};

use super::super::batch::{self, Head, Kind, LINE, Record, SLOT};
use super::super::memory::Area;
use super::super::{incoming, mirror};
use super::*;

/// Results that NCCL tells apart.
const ARGUMENT: &str = "ncclInvalidArgument";
const REMOTE: &str = "ncclRemoteError";
const SYSTEM: &str = "ncclSystemError";

fn refused<T: std::fmt::Debug>(what: &str, outcome: Result<T, crossrail_types::Error>, status: &str) {
    let error = outcome.expect_err(what).detail;
    assert!(error.contains(status), "{what}: {error}");
}

#[test]
fn handles_that_are_unknown_are_errors() {
    let world = World::new(14, 2);
    let rank = &world.0[0];
    let window = world.register(0, || Memory::host(4096));
    let (rma, group, contexts, mine) = (&rank.rma, rank.group, rank.contexts, window.handles[0]);
    let stack = 5_u64;
    let wrong = [
        RmaObject::NULL,
        RmaObject(8 as *mut _),
        RmaObject(usize::MAX as *mut _),
        RmaObject(ptr::from_ref(&stack).cast_mut().cast()),
        rma.context(),
    ];
    for object in wrong.into_iter().chain([mine]) {
        let route = Route { contexts: object, ..rank.to(0, 1) };
        refused("iput", rma.put(route, (0, mine), 8, (0, mine)), ARGUMENT);
        refused("iflush", rma.flush(route), ARGUMENT);
        refused("createContext", rma.contexts(object, 1, 1), ARGUMENT);
        refused("deregMrSym", rma.deregister(object, mine), ARGUMENT);
        refused("test", rma.test(object, mine), ARGUMENT);
        refused("rmaProgress", rma.progress(object), ARGUMENT);
        refused("queryLastError", rma.has_error(object), ARGUMENT);
        refused("destroyContext", rma.destroy_contexts(object), ARGUMENT);
        refused("closeColl", rma.close_group(object), ARGUMENT);
        refused("closeListen", rma.close_listener(object), ARGUMENT);
    }
    for object in wrong.into_iter().chain([contexts, group]) {
        let route = rank.to(0, 1);
        refused("iput from", rma.put(route, (0, object), 8, (0, mine)), ARGUMENT);
        refused("iput to", rma.put(route, (0, mine), 8, (0, object)), ARGUMENT);
        refused("iget", rma.get(route, (0, object), 8, (0, mine)), ARGUMENT);
        let done = signal((0, object), SIGNAL_INC, 0);
        refused("iputSignal", rma.put_signal(route, (0, mine), 8, (0, mine), done), ARGUMENT);
        refused("deregMrSym", rma.deregister(group, object), ARGUMENT);
        refused("test", rma.test(group, object), ARGUMENT);
    }
    let handles = [[7; 128]; 2];
    refused("connect", rma.connect(rma.context(), &handles, 0, RmaObject::NULL), ARGUMENT);
    let (listener, handle) = rma.listen(rma.context(), 0).expect("a listener");
    refused("connect to garbage", rma.connect(rma.context(), &handles, 0, listener), ARGUMENT);
    refused("connect as another", rma.connect(rma.context(), &[[7; 128], handle], 2, listener), ARGUMENT);
    refused("a device", rma.listen(rma.context(), 1), ARGUMENT);
    rma.close_listener(listener).expect("close");
    refused("close twice", rma.close_listener(listener), ARGUMENT);
    refused("finalize", rma.finalize(group), ARGUMENT);
    rma.finalize(RmaObject::NULL).expect("after a failed init");
}

#[test]
fn arguments_that_are_out_of_range_are_errors_and_the_rest_works() {
    let world = World::new(14, 2);
    let (rank, other) = (&world.0[0], World::new(14, 1));
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(4096, &plan));
    let foreign = other.register(0, || Memory::host(4096)).handles[0];
    let (rma, mine) = (&rank.rma, window.handles[0]);
    for route in [rank.to(4, 1), rank.to(-1, 1), rank.to(i32::MAX, 1), rank.to(0, 2), rank.to(0, u32::MAX)] {
        refused("iput", rma.put(route, (0, mine), 8, (0, mine)), ARGUMENT);
        refused("iget", rma.get(route, (0, mine), 8, (0, mine)), ARGUMENT);
        refused("iflush", rma.flush(route), ARGUMENT);
    }
    let route = rank.to(0, 1);
    for (at, len) in [(4096, 1), (0, 4097), (u64::MAX, 8), (8, usize::MAX)] {
        refused("the source", rma.put(route, (at, mine), len, (0, mine)), ARGUMENT);
        refused("the target of a get", rma.get(route, (0, mine), len, (at, mine)), ARGUMENT);
        if len <= 4096 {
            // What the peer has registered only the peer knows.
            let put = rma.put(route, (0, mine), len, (at, mine)).expect("a put");
            assert!(rank.error(put).contains("ncclInternalError"), "a put to {at}");
            let get = rma.get(route, (at, mine), len, (0, mine)).expect("a get");
            assert!(rank.error(get).contains("ncclInternalError"), "a get from {at}");
        }
    }
    refused("no source", rma.put(route, (0, RmaObject::NULL), 8, (0, mine)), ARGUMENT);
    refused("another group's", rma.put(route, (0, foreign), 8, (0, mine)), ARGUMENT);
    refused("to another group's", rma.put(route, (0, mine), 8, (0, foreign)), ARGUMENT);
    refused("of another group", rma.deregister(rank.group, foreign), ARGUMENT);
    let put = |operation, at| rma.put_signal(route, (0, mine), 8, (0, mine), signal((at, mine), operation, 1));
    refused("an operation", put(3, 0), ARGUMENT);
    for at in [4, 4096, u64::MAX] {
        let request = put(SIGNAL_ADD, at).expect("a put");
        assert!(rank.error(request).contains("ncclInternalError"), "a signal at {at}");
    }
    for (count, stride) in [(-1, 1), (1, 0), (1, -1), (1, 3)] {
        refused("createContext", rma.contexts(rank.group, count, stride), ARGUMENT);
    }
    let alone = Route { contexts: rma.contexts(rank.group, 1, 2).expect("contexts"), context: 0, rank: 1 };
    refused("no peer by the stride", rma.put(alone, (0, mine), 8, (0, mine)), ARGUMENT);
    // SAFETY: nothing is registered.
    let register = |at: usize, len, kind| unsafe { rma.register(rank.group, (at as *mut u8, len), (kind, 0), false) };
    refused("no memory", register(0, 8, PTR_HOST), ARGUMENT);
    refused("too much memory", register(4096, usize::MAX, PTR_HOST), ARGUMENT);
    refused("a kind of memory", register(4096, 8, 9), ARGUMENT);
    rank.finish(put(SIGNAL_ADD, 8).expect("a put"));
    assert_eq!(window.memory[1].load(8), 1);
    assert_eq!(rma.has_error(rank.contexts), Ok(false), "the connection is as good as before");
}

#[test]
fn a_second_gpu_is_refused() {
    let world = World::new(14, 1);
    let plan = Arc::new(Plan::default());
    let _first = world.register(0, || Memory::gpu(4096, &plan));
    let second = Double::new(4096, 1, &plan);
    let rank = &world.0[0];
    // SAFETY: not registered.
    let outcome = unsafe { rank.rma.register(rank.group, (second.at(), 4096), (PTR_CUDA, 0), false) };
    refused("another GPU", outcome, "ncclInvalidUsage");
}

#[test]
fn as_many_requests_as_nccl_has_are_in_flight_and_one_more_is_an_error() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(1 << 20, &plan));
    let (rank, mine) = (&world.0[0], window.handles[0]);
    plan.held.store(true, Ordering::Release);
    let put = |context, at: u64| rank.rma.put(rank.to(context, 1), (8 * at, mine), 8, (8 * at, mine));
    let mut requests: Vec<RmaObject> = (0..256).map(|at| put(0, at).expect("room")).collect();
    refused("the 257th", put(0, 256), SYSTEM);
    requests.extend((0..256).map(|at| put(1, at).expect("another context has its own")));
    assert!(requests.iter().all(|request| rank.rma.test(rank.group, *request) == Ok(false)));
    plan.held.store(false, Ordering::Release);
    requests.into_iter().for_each(|request| rank.finish(request));
    rank.finish(put(0, 256).expect("room again"));
}

#[test]
fn inline_values_may_be_freed_before_their_registration_ends() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(4096, &plan));
    let rank = &world.0[0];
    let inlines = Memory::host(4096);
    inlines.bytes().fill(7);
    let handle = rank.register(&inlines, 0);
    world.0[1].register(&Memory::host(4096), 0);
    plan.held.store(true, Ordering::Release);
    let put = |at: u64| rank.rma.put(rank.to(0, 1), (at, handle), 8, (at, window.handles[0])).expect("a put");
    let requests: Vec<RmaObject> = (0..8).map(|at| put(8 * at)).collect();
    drop(inlines);
    plan.held.store(false, Ordering::Release);
    rank.rma.deregister(rank.group, handle).expect("deregister");
    requests.into_iter().for_each(|request| rank.finish(request));
    assert!(window.memory[1].bytes()[..64].iter().all(|byte| *byte == 7));
    refused("deregister twice", rank.rma.deregister(rank.group, handle), ARGUMENT);
}

#[test]
fn contexts_and_memory_may_end_with_requests_in_flight() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(SIGNALS, || Memory::gpu(4 << 20, &plan));
    let rank = &world.0[0];
    let mine = window.handles[0];
    plan.polls.store(20, Ordering::Relaxed);
    let contexts = rank.rma.contexts(rank.group, 1, 1).expect("contexts");
    let route = Route { contexts, context: 0, rank: 1 };
    let done = signal((0, mine), SIGNAL_INC, 0);
    let requests: Vec<RmaObject> = (0..200)
        .map(|_| rank.rma.put_signal(route, (64, mine), 1 << 20, (1 << 20, mine), done).expect("a put"))
        .collect();
    rank.rma.destroy_contexts(contexts).expect("destroy");
    refused("its requests", rank.rma.put(route, (0, mine), 8, (0, mine)), ARGUMENT);
    rank.rma.deregister(rank.group, mine).expect("deregister");
    // No thread reads the memory any more: an access to the freed pages would fault.
    let Registered { mut memory, .. } = window;
    drop(memory.remove(0));
    until("an answer to what was sent", || rank.rma.test(rank.group, requests[0]).is_err());
    drop(world);
}

#[test]
fn groups_are_closed_with_everything_in_flight() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    plan.polls.store(20, Ordering::Relaxed);
    let window = world.register(SIGNALS, || Memory::gpu(4 << 20, &plan));
    for (rank, mine) in world.0.iter().zip(&window.handles) {
        for at in 0..50 {
            let (route, done) = (rank.to(0, at % 2), signal((0, *mine), SIGNAL_INC, 0));
            rank.rma.get(route, (64, *mine), 1 << 20, (1 << 20, *mine)).expect("a get");
            rank.rma.put_signal(route, (64, *mine), 1 << 20, (2 << 20, *mine), done).expect("a put");
        }
    }
    world.0.iter().for_each(|rank| rank.rma.close_group(rank.group).expect("close"));
    // An access from now on would fault.
    drop(window);
    refused("a group that is closed", world.0[0].rma.contexts(world.0[0].group, 1, 1), ARGUMENT);
    let route = world.0[0].to(0, 1);
    refused("a context of it", world.0[0].rma.flush(route), ARGUMENT);
}

#[test]
fn a_peer_that_has_left_is_an_error_of_all_requests_to_it() {
    let world = World::new(15, 2);
    // Only this rank's copies are held: nothing of its requests is sent.
    let plans = [Arc::new(Plan::default()), Arc::new(Plan::default())];
    let memory = [0, 1].map(|rank| Memory::gpu(1 << 20, &plans[rank]));
    let handles = [0, 1].map(|rank| world.0[rank].register(&memory[rank], SIGNALS));
    let (rank, mine) = (&world.0[0], handles[0]);
    plans[0].held.store(true, Ordering::Release);
    let requests = [
        rank.rma.put(rank.to(0, 1), (0, mine), 1000, (0, mine)).expect("a put"),
        rank.rma.get(rank.to(1, 1), (0, mine), 1000, (5000, mine)).expect("a get"),
    ];
    world.0[1].rma.close_group(world.0[1].group).expect("close");
    for request in requests {
        assert!(rank.error(request).contains(REMOTE));
    }
    plans[0].held.store(false, Ordering::Release);
    until("the loss", || rank.rma.has_error(rank.contexts) == Ok(true));
    refused("a put to it", rank.rma.put(rank.to(0, 1), (0, mine), 8, (0, mine)), REMOTE);
    // Its own memory is still reached.
    let own = rank.rma.put(rank.to(0, 0), (0, mine), 8, (64, mine)).expect("a put");
    rank.finish(own);
}

#[test]
fn a_gpu_that_fails_fails_the_requests() {
    let world = World::new(14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(4096, &plan));
    let (rank, mine) = (&world.0[0], window.handles[0]);
    plan.fails.store(true, Ordering::Relaxed);
    let put = rank.rma.put(rank.to(0, 1), (0, mine), 100, (0, mine)).expect("a put");
    assert!(rank.error(put).contains(SYSTEM));
    assert_eq!(rank.rma.has_error(rank.contexts), Ok(true));
}

#[test]
fn a_batch_that_no_peer_sends_ends_the_connection() {
    let record = Record { kind: Kind::Put, registration: 0, offset: 0, len: 8, at: 0, signal: None, tag: 0 };
    let head = Head { records: 1, payload: 8, number: 0 };
    let with = |head: Head, record: Record| [head.encode().to_vec(), record.encode().to_vec(), vec![1; 8]].concat();
    let noise: Vec<u8> = (0..300).map(|at| pattern(at, 99)).collect();
    let wrong = [
        vec![0; 64],
        noise,
        with(Head { number: 1, ..head }, record),
        with(Head { records: 513, ..head }, record),
        with(Head { payload: 1 << 30, ..head }, record),
        with(head, Record { len: 9, ..record }),
        with(head, Record { at: u32::MAX, ..record }),
    ];
    for (number, bytes) in wrong.into_iter().enumerate() {
        assert!(delivers(&bytes).is_err(), "batch {number}");
    }
    // These are refused, record by record.
    for record in [record, Record { kind: Kind::Get, ..record }, Record { kind: Kind::Reply, tag: 7, ..record }] {
        let answer = delivers(&with(head, record)).expect("an answer").expect("a refusal");
        assert!(answer.refuses(0) && !answer.refuses(1), "{record:?}");
    }
    assert_eq!(delivers(&with(head, Record { len: 0, ..record })), Ok(None));
}

/// Answer of a receiver without any registration to these bytes in its first slot.
fn delivers(bytes: &[u8]) -> Result<Option<batch::Answer>, String> {
    use super::super::incoming::Applier;
    use super::super::outgoing;
    use super::super::shared::Shared;

    let shared = Shared::new(77, 0, 2, Duration::ZERO).expect("a group");
    let (mut theirs, ours) = mirror::pair().expect("a wire");
    let inbox = Arc::new(Area::new(4 * SLOT).expect("memory"));
    let offer = incoming::IncomingOffer::new(Box::new(ours), inbox).expect("an offer");
    let mine = offer.mine.clone();
    // What the peer would expose for answers.
    let lines = Arc::new(Area::new(4 * batch::ANSWER).expect("memory"));
    let extent = crossrail::placing::Extent::host(lines.at(0, lines.len()), lines.len());
    // SAFETY: kept as long as the wire.
    let key = unsafe { theirs.expose(&extent, &Arc::default()) }.expect("a key");
    let counters = [theirs.count(4).expect("a counter"), theirs.count(4).expect("a counter")];
    let answers = outgoing::Answers { key, accepted: counters[0], refused: counters[1] };
    let mut incoming = offer.accept(&shared, 1, answers).expect("a link");
    let mut applier = Applier::new(Arc::new(Area::new(incoming::SCRATCH).expect("memory")));
    let from = crossrail::placing::Extent::host(bytes.as_ptr(), bytes.len());
    let imm = Imm { counter: mine.data, piece: 0 };
    // SAFETY: copied at once.
    unsafe { theirs.write(&[from], &mine.key, 0, imm, 0) }.expect("written");
    assert!(bytes.len() <= LINE * 8);
    let mut answer = None;
    let deadline = Instant::now() + LIMIT;
    while answer.is_none() {
        assert!(Instant::now() < deadline, "no answer");
        incoming.advance(&mut applier).map_err(|error| error.to_string())?;
        let _ = theirs.poll(&mut |event| {
            if let crossrail::placing::Event::Arrived(imm) = event {
                let refused = imm.counter == counters[1];
                answer = Some(refused.then(|| batch::Answer::decode(&lines.read(0))));
            }
        });
    }
    Ok(answer.flatten())
}
