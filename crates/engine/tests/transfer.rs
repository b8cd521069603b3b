//! Two workers of one process, over every transport: what a user sees of sends, receives, regions and failures.

use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crossrail::{
    Buffer, ConnectOptions, Context, Endpoint, ErrorKind, Op, Protocol, Request, Settings, Turn, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

struct Pair {
    settings: Vec<(String, String)>,
    a: Worker,
    b: Worker,
    ab: Endpoint,
    ba: Endpoint,
}

fn context(pairs: &[(&str, &str)]) -> Context {
    Context::new(Settings::from_pairs(pairs.iter().copied()).unwrap()).unwrap()
}

fn pair_of(pairs: &[(&str, &str)]) -> Pair {
    let one = context(pairs);
    let other = context(pairs);
    let a = Worker::new(&one, WorkerOptions::default()).unwrap();
    let b = Worker::new(&other, WorkerOptions::default()).unwrap();
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(LIMIT).unwrap();
    let settings = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Pair { settings, a, b, ab, ba }
}

fn each(mut body: impl FnMut(&str, Pair)) {
    body("shm", pair_of(&[("CROSSRAIL_TLS", "shm")]));
    body("tcp", pair_of(&[("CROSSRAIL_TLS", "tcp")]));
    let rails = "127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4";
    body(
        "tcp x 4",
        pair_of(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", rails), ("CROSSRAIL_CHUNK", "256K")]),
    );
    body(
        "tcp, io threads",
        pair_of(&[
            ("CROSSRAIL_TLS", "tcp"),
            ("CROSSRAIL_NET_DEVICES", rails),
            ("CROSSRAIL_IO_THREADS", "2"),
            ("CROSSRAIL_CHANNELS", "2"),
        ]),
    );
    if has_fabric() {
        body("fabric over tcp", pair_of(&[("CROSSRAIL_TLS", "fabric:tcp"), ("CROSSRAIL_CHUNK", "256K")]));
    }
    if has_ucx() {
        body("ucx over tcp", pair_of(&[("CROSSRAIL_TLS", "ucx:tcp"), ("CROSSRAIL_CHUNK", "256K")]));
        body("ucx over memory", pair_of(&[("CROSSRAIL_TLS", "ucx:posix,sysv,cma")]));
    }
}

/// True if libfabric can be used here; otherwise the reason is reported.
fn has_fabric() -> bool {
    let transports = context(&[("CROSSRAIL_TLS", "fabric:tcp")]).info().unwrap().transports;
    let fabric = transports.into_iter().find(|row| row.name == "fabric").expect("a row");
    if !fabric.usable {
        crossrail_transport::conformance::skip(&fabric.reason.unwrap_or_default());
    }
    fabric.usable
}

/// Whether UCX can be used here; if not, that is reported.
fn has_ucx() -> bool {
    let transports = context(&[("CROSSRAIL_TLS", "ucx")]).info().unwrap().transports;
    let row = transports.into_iter().find(|row| row.name == "ucx").expect("a row");
    if !row.usable {
        crossrail_transport::conformance::skip(&row.reason.unwrap_or_default());
    }
    row.usable
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 29) as u8).collect()
}

#[test]
fn messages_of_every_size_arrive_whole() {
    each(|transport, pair| {
        for (at, size) in
            [0, 1, 8, 24, 25, 100, 4096, 8191, 65_536, 65_537, 300_001, 1 << 20, (5 << 20) + 3].into_iter().enumerate()
        {
            let sent = pattern(size, at as u64);
            let receive = pair.b.recv(vec![0; size], at as u64, u64::MAX, None).unwrap();
            let send = pair.ab.send(sent.clone(), at as u64).unwrap();
            let receipt = receive.wait(LIMIT).unwrap_or_else(|error| panic!("{transport}, {size}: {error}"));
            assert_eq!(receipt.bytes, size as u64, "{transport}");
            assert_eq!(receipt.tag, at as u64, "{transport}");
            let done = send.wait(LIMIT).unwrap_or_else(|error| panic!("{transport}, {size}: {error}"));
            assert_eq!(done.bytes, size as u64, "{transport}");
            assert_eq!(done.lanes().iter().map(|lane| lane.bytes).sum::<u64>(), size as u64, "{transport} {size}");
            assert_eq!(receive.into_vec().unwrap(), sent, "{transport}, {size}");
        }
    });
}

/// Tests a request until it is finished; nothing else makes progress meanwhile.
fn tested(request: &Request, what: &str) {
    let begun = Instant::now();
    let receipt = loop {
        if let Some(outcome) = request.test() {
            break outcome.expect(what);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} does not finish");
    };
    assert_eq!(receipt.bytes, 8, "{what}");
}

#[test]
fn short_messages_of_one_peer_hold_up_neither_their_sender_nor_other_peers() {
    let context = context(&[("CROSSRAIL_TLS", "shm")]);
    let options = || WorkerOptions { background: false, ..WorkerOptions::default() };
    let [hub, busy, quiet] = [(); 3].map(|()| Worker::new(&context, options()).unwrap());
    let connect = |from: &Worker| {
        std::thread::scope(|scope| {
            let dialling = scope.spawn(|| from.connect(&hub.address(), &ConnectOptions::default()));
            let accepted = hub.accept(LIMIT).unwrap();
            (dialling.join().unwrap().unwrap(), accepted)
        })
    };
    let ((busy_to_hub, from_busy), (quiet_to_hub, from_quiet)) = (connect(&busy), connect(&quiet));
    let exchange = |round: u8| {
        let received = hub.recv(vec![0; 8], 1, u64::MAX, Some(&from_busy)).unwrap();
        let sent = busy_to_hub.send(vec![round; 8], 1).unwrap();
        tested(&received, "the receive");
        assert_eq!(received.into_vec(), Some(vec![round; 8]));
        // The hub makes no progress any more: it must have confirmed the message as it received it.
        tested(&sent, "the send");
    };
    (0..4).for_each(exchange);
    let waiting = hub.recv(vec![0; 8], 2, u64::MAX, Some(&from_quiet)).unwrap();
    let sent = quiet_to_hub.send(vec![9; 8], 2).unwrap();
    (4..68).for_each(exchange);
    assert!(waiting.is_done(), "the other peer's message is still in its lane");
    assert_eq!(waiting.into_vec(), Some(vec![9; 8]));
    tested(&sent, "the other peer's send");
}

#[test]
fn unexpected_messages_wait_for_their_receive() {
    each(|transport, pair| {
        let sizes = [0, 8, 40_000, 200_000];
        let sends: Vec<_> = sizes.iter().map(|size| pair.ab.send(pattern(*size, 1), *size as u64).unwrap()).collect();
        std::thread::sleep(Duration::from_millis(20));
        for size in sizes.iter().rev() {
            let receive = pair.b.recv(vec![0; *size], *size as u64, u64::MAX, Some(&pair.ba)).unwrap();
            receive.wait(LIMIT).unwrap_or_else(|error| panic!("{transport}, {size}: {error}"));
            assert_eq!(receive.into_vec().unwrap(), pattern(*size, 1), "{transport}");
        }
        for send in sends {
            send.wait(LIMIT).unwrap();
        }
    });
}

#[test]
fn a_truncated_receive_fails_at_both_ends() {
    each(|transport, pair| {
        for size in [10, 70_000, 1 << 20] {
            for unexpected in [false, true] {
                let posted = (!unexpected).then(|| pair.b.recv(vec![0; size - 1], 5, u64::MAX, None).unwrap());
                let send = pair.ab.send(vec![1; size], 5).unwrap();
                let receive = posted.unwrap_or_else(|| pair.b.recv(vec![0; size - 1], 5, u64::MAX, None).unwrap());
                for error in [receive.wait(LIMIT).unwrap_err(), send.wait(LIMIT).unwrap_err()] {
                    assert_eq!(error.kind, ErrorKind::Truncated, "{transport}: {error}");
                    assert!(error.to_string().contains(&size.to_string()), "{error}");
                }
            }
        }
        // The connection goes on.
        let receive = pair.b.recv(vec![0; 4], 6, u64::MAX, None).unwrap();
        pair.ab.send(vec![7; 4], 6).unwrap().wait(LIMIT).unwrap();
        receive.wait(LIMIT).unwrap();
    });
}

#[test]
fn regions_are_written_and_read_by_key_and_counted() {
    each(|transport, pair| {
        let memory = context(&[]).alloc(1 << 20).unwrap();
        let region = pair.b.register(&memory).unwrap();
        let key = crossrail::RegionKey::from_bytes(&region.key().to_bytes()).unwrap();
        for (at, size) in [1, 8, 1000, 70_000, 500_000].into_iter().enumerate() {
            let bytes = pattern(size, 9);
            let offset = 1000 + at as u64;
            pair.ab.write(bytes.clone(), &key, offset, Some(3)).unwrap().wait(LIMIT).unwrap();
            region.wait_imm(3, at as u64 + 1, LIMIT).unwrap();
            let mut seen = vec![0; size];
            memory.copy_to(offset as usize, &mut seen).unwrap();
            assert_eq!(seen, bytes, "{transport}, write {size}");
            let read = pair.ab.read(vec![0; size], &key, offset).unwrap();
            read.wait(LIMIT).unwrap();
            assert_eq!(read.into_vec().unwrap(), bytes, "{transport}, read {size}");
        }
        for size in [8, 300_000] {
            let beyond = pair.ab.write(vec![0; size], &key, (1 << 20) - 4, None).unwrap().wait(LIMIT).unwrap_err();
            assert_eq!(beyond.kind, ErrorKind::Region, "{transport}: {beyond}");
        }
        let mut forged = region.key().to_bytes();
        *forged.last_mut().unwrap() ^= 1;
        let forged = crossrail::RegionKey::from_bytes(&forged).unwrap();
        let error = pair.ab.read(vec![0; 8], &forged, 0).unwrap().wait(LIMIT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{transport}: {error}");
        region.deregister().unwrap();
        let error = pair.ab.write(vec![0; 8], &key, 0, None).unwrap().wait(LIMIT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{transport}: {error}");
    });
}

#[test]
fn a_batch_is_one_request() {
    each(|transport, pair| {
        let region = pair.b.register(vec![0; 4096]).unwrap();
        let receive = pair.b.recv(vec![0; 100], 1, u64::MAX, None).unwrap();
        let ops = vec![
            Op::Write { local: Buffer::from(vec![1; 10]), remote: region.key(), offset: 0, imm: Some(1) },
            Op::Send { buffer: Buffer::from(vec![2; 100]), tag: 1 },
            Op::Read { local: Buffer::from(vec![0; 50]), remote: region.key(), offset: 0 },
        ];
        let receipt = pair.ab.batch(ops).unwrap().wait(LIMIT).unwrap();
        assert_eq!(receipt.bytes, 160, "{transport}");
        receive.wait(LIMIT).unwrap();
        let ops = vec![
            Op::Write { local: Buffer::from(vec![1; 10]), remote: region.key(), offset: 4095, imm: None },
            Op::Write { local: Buffer::from(vec![1; 10]), remote: region.key(), offset: 0, imm: None },
        ];
        let error = pair.ab.batch(ops).unwrap().wait(LIMIT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{transport}");
        assert_eq!(pair.a.operations(), 0, "{transport}");
    });
}

#[test]
fn waits_are_bounded_and_cancel_gives_the_request_back() {
    each(|transport, pair| {
        let receive = pair.b.recv(vec![0; 8], 77, u64::MAX, Some(&pair.ba)).unwrap();
        let error = receive.wait(Some(Duration::from_millis(30))).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Timeout, "{transport}");
        receive.cancel();
        assert_eq!(receive.wait(LIMIT).unwrap_err().kind, ErrorKind::Cancelled, "{transport}");
        for size in [8, 1 << 20] {
            let send = pair.ab.send(vec![0; size], 78).unwrap();
            assert_eq!(send.wait(Some(Duration::from_millis(20))).unwrap_err().kind, ErrorKind::Timeout);
            send.cancel();
            assert_eq!(send.wait(LIMIT).unwrap_err().kind, ErrorKind::Cancelled, "{transport}");
        }
        let receive = pair.b.recv(vec![0; 8], 79, u64::MAX, None).unwrap();
        pair.ab.send(vec![3; 8], 79).unwrap().wait(LIMIT).unwrap();
        receive.wait(LIMIT).unwrap();
    });
}

#[test]
fn a_closed_peer_fails_only_its_own_requests() {
    each(|transport, pair| {
        let settings: Vec<_> = pair.settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let third = Worker::new(&context(&settings), WorkerOptions::default()).unwrap();
        let to_third = pair.a.connect(&third.address(), &ConnectOptions::default()).unwrap();
        let from_third = third.accept(LIMIT).unwrap();
        let doomed = pair.a.recv(vec![0; 8], 1, u64::MAX, Some(&pair.ab)).unwrap();
        let large = pair.ab.send(vec![0; 8 << 20], 9).unwrap();
        pair.b.close().unwrap();
        let error = doomed.wait(LIMIT).unwrap_err();
        assert!(matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed), "{transport}: {error}");
        assert!(large.wait(LIMIT).is_err());
        let receive = pair.a.recv(vec![0; 8], 2, u64::MAX, Some(&to_third)).unwrap();
        from_third.send(vec![4; 8], 2).unwrap().wait(LIMIT).unwrap();
        receive.wait(LIMIT).unwrap();
    });
}

#[test]
fn a_worker_talks_to_itself() {
    // Also where settings name other transports: none of those joins a worker with itself.
    for settings in [&[][..], &[("CROSSRAIL_TLS", "tcp")], &[("CROSSRAIL_TLS", "shm")], &[("CROSSRAIL_TLS", "^tcp")]] {
        let worker = Worker::new(&context(settings), WorkerOptions::default()).unwrap();
        for to in [worker.address(), worker.control_addresses()[0].to_string().into_bytes()] {
            let endpoint = worker.connect(&to, &ConnectOptions::default()).unwrap();
            let receive = worker.recv(vec![0; 100_000], 1, u64::MAX, None).unwrap();
            endpoint.send(pattern(100_000, 3), 1).unwrap().wait(LIMIT).unwrap();
            receive.wait(LIMIT).unwrap();
            assert_eq!(receive.into_vec().unwrap(), pattern(100_000, 3));
            assert!(endpoint.explain().small.contains("self"));
        }
    }
}

#[test]
fn both_directions_at_once_under_load() {
    each(|transport, pair| {
        let mut requests = Vec::new();
        for round in 0..40_u64 {
            let size = [8, 3000, 70_000, 1 << 20][round as usize % 4];
            requests.push(pair.b.recv(vec![0; size], round, u64::MAX, Some(&pair.ba)).unwrap());
            requests.push(pair.a.recv(vec![0; size], round, u64::MAX, Some(&pair.ab)).unwrap());
            requests.push(pair.ab.send(pattern(size, round), round).unwrap());
            requests.push(pair.ba.send(pattern(size, round), round).unwrap());
        }
        for (at, request) in requests.into_iter().enumerate() {
            request.wait(LIMIT).unwrap_or_else(|error| panic!("{transport}, {at}: {error}"));
            if let Some(bytes) = request.into_vec() {
                assert_eq!(bytes, pattern(bytes.len(), at as u64 / 4), "{transport}, {at}");
            }
        }
    });
}

#[test]
fn many_single_copies_at_once_bring_each_message_into_its_own_memory() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "shm")]);
    let sizes = [33_000, 64 << 10, 65_537, 100_003, 1_000_003, (128 << 10) + 1];
    for (worker, endpoint) in [(&pair.b, &pair.ab), (&pair.a, &pair.ba)] {
        let message = |at: usize| pattern(sizes[at % sizes.len()], at as u64);
        let into = |at: usize| worker.recv(vec![0; message(at).len()], at as u64, u64::MAX, None).unwrap();
        let receives: Vec<Request> = (0..100).map(into).collect();
        let sends: Vec<Request> = (0..100).map(|at| endpoint.send(message(at), at as u64).unwrap()).collect();
        for (at, (receive, send)) in receives.into_iter().zip(sends).enumerate() {
            let receipt = receive.wait(LIMIT).unwrap();
            assert!(receive.into_vec().unwrap() == message(at), "message {at}");
            // Where the kernel may not copy, they go through the ring.
            if endpoint.explain().large.contains("shm(cma)") {
                assert_eq!(receipt.protocol, Protocol::Cma, "message {at}");
            }
            send.wait(LIMIT).unwrap();
        }
    }
}

#[test]
fn a_transfer_cancelled_in_the_middle_ends_at_both_ends() {
    each(|transport, pair| {
        let size = 16 << 20;
        for round in 0..60_u64 {
            let receive = pair.b.recv(vec![0; size], round, u64::MAX, None).unwrap();
            let send = pair.ab.send(vec![1; size], round).unwrap();
            std::thread::sleep(Duration::from_micros(round * 50));
            if round % 2 == 0 {
                receive.cancel()
            } else {
                send.cancel()
            }
            for (end, request) in [("receive", &receive), ("send", &send)] {
                if let Err(error) = request.wait(Some(Duration::from_secs(5))) {
                    assert_eq!(error.kind, ErrorKind::Cancelled, "{transport}, round {round}, {end}: {error}");
                    // Nobody had taken it: the other end waits for somebody who does.
                    if error.detail.contains("before a message matched it") {
                        send.cancel();
                    }
                }
            }
        }
    });
}

#[test]
fn a_collected_outcome_is_told_again() {
    each(|transport, pair| {
        // Lent memory, not a vector: such a request leaves the worker's table with its first answer.
        let [to, from] = [16, 16].map(|len| context(&[]).alloc(len).unwrap());
        let receive = pair.b.recv(&to, 7, u64::MAX, None).unwrap();
        let send = pair.ab.send(&from, 7).unwrap();
        for (end, worker, request) in [("receive", &pair.b, &receive), ("send", &pair.a, &send)] {
            let first = request.wait(LIMIT).unwrap_or_else(|error| panic!("{transport}, {end}: {error}"));
            assert_eq!((first.bytes, first.tag), (16, 7), "{transport}, {end}");
            assert_eq!(worker.operations(), 0, "{transport}, {end}");
            // Another operation takes its place there meanwhile.
            let other = worker.recv(vec![0; 4], 9, u64::MAX, None).unwrap();
            assert!(request.is_done() && !other.is_done(), "{transport}, {end}");
            let (tell, told) = std::sync::mpsc::channel();
            request.on_complete(move |result| tell.send(result).unwrap());
            for again in [request.wait(LIMIT), request.test().unwrap(), told.recv_timeout(LIMIT.unwrap()).unwrap()] {
                let again = again.unwrap_or_else(|error| panic!("{transport}, {end}: {error}"));
                let of = |receipt: &crossrail::Receipt| {
                    (receipt.bytes, receipt.tag, receipt.protocol, receipt.wire_us, receipt.lanes())
                };
                assert_eq!(of(&again), of(&first), "{transport}, {end}");
                assert_eq!(again.peer(), first.peer(), "{transport}, {end}");
            }
            other.cancel();
            assert_eq!(other.wait(LIMIT).unwrap_err().kind, ErrorKind::Cancelled, "{transport}, {end}");
        }
    });
}

#[test]
fn lanes_over_ucx_say_what_it_uses() {
    if !has_ucx() {
        return;
    }
    let pair = pair_of(&[("CROSSRAIL_TLS", "ucx:tcp")]);
    for endpoint in [&pair.ab, &pair.ba] {
        let explain = endpoint.explain();
        assert_eq!(explain.small, "ucx/lo", "{explain}");
        let tcp = explain.candidates.iter().find(|row| row.transport == "tcp").expect("a row");
        assert_eq!(tcp.reason.as_deref(), Some("CROSSRAIL_TLS=ucx:tcp leaves it out"), "{explain}");
        let names: Vec<String> = endpoint.lanes().into_iter().map(|lane| lane.name).collect();
        assert_eq!(names, ["ucx/lo:messages(tcp/lo)", "ucx/lo(tcp/lo)"]);
    }
}

#[test]
fn ucx_is_not_chosen_without_a_gain() {
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        // An RDMA device is the gain.
        return;
    }
    let pair = pair_of(&[]);
    let explain = pair.ab.explain();
    let row = explain.candidates.iter().find(|row| row.transport == "ucx").expect("a row");
    assert!(row.reason.as_deref().is_some_and(|why| why.contains("no RDMA device is here")), "{explain}");
    let info = context(&[]).info().unwrap().transports.into_iter().find(|row| row.name == "ucx").expect("a row");
    assert!(!info.usable && info.fix.is_some_and(|fix| fix.contains("CROSSRAIL_TLS=ucx")));
}

/// Of many endpoints, those over which nothing goes are not polled. What a peer sends over one arrives all the same,
/// whether the worker is kept busy by waits or by tests of another endpoint's messages.
#[test]
fn an_idle_endpoint_is_heard_beside_a_busy_one() {
    const ENDPOINTS: usize = 80;
    const UNTIL_IDLE: usize = 3000;
    const MOST_TRIPS: usize = 20_000;
    const PING: u64 = 1;
    const PONG: u64 = 2;
    const IDLE: u64 = 3;
    const STOP: u8 = 1;
    // So many connections over TCP would take more descriptors than a process has where nobody has raised the limit.
    let (one, other) = (context(&[("CROSSRAIL_TLS", "shm")]), context(&[("CROSSRAIL_TLS", "shm")]));
    let options = || WorkerOptions { background: false, ..WorkerOptions::default() };
    let (a, b) = (Worker::new(&one, options()).unwrap(), Worker::new(&other, options()).unwrap());
    let ends: Vec<_> = (0..ENDPOINTS).map(|_| connect_without_threads(&a, &b)).collect();
    let (busy, echo) = &ends[0];
    let trip = |word: u8, waits: bool| {
        let ping = busy.send(vec![word; 8], PING).unwrap();
        let pong = a.recv(vec![0; 8], PONG, u64::MAX, Some(busy)).unwrap();
        while !waits && pong.test().is_none() {}
        pong.wait(LIMIT).unwrap();
        ping.wait(LIMIT).unwrap();
    };
    std::thread::scope(|scope| {
        let echoing = scope.spawn(|| {
            let mut word = 0;
            while word != STOP {
                let ping = b.recv(vec![0; 8], PING, u64::MAX, Some(echo)).unwrap();
                ping.wait(LIMIT).unwrap();
                word = ping.into_vec().unwrap()[0];
                echo.send(vec![0; 8], PONG).unwrap().wait(LIMIT).unwrap();
            }
        });
        (0..UNTIL_IDLE).for_each(|_| trip(0, true));
        for (at, waits) in [(5, true), (6, false)] {
            let (here, there) = &ends[at];
            let received = a.recv(vec![0; 8], IDLE, u64::MAX, Some(here)).unwrap();
            let sent = there.send(vec![7; 8], IDLE).unwrap();
            let arrived = (0..MOST_TRIPS).any(|_| {
                trip(0, waits);
                received.is_done()
            });
            assert!(arrived, "nothing came over an idle endpoint in {MOST_TRIPS} round trips");
            sent.wait(LIMIT).unwrap();
        }
        trip(STOP, true);
        // The last answer's confirmation is sent by whoever makes progress.
        while !echoing.is_finished() {
            a.progress();
        }
    });
}

/// Connects workers that make progress only while they are called.
fn connect_without_threads(a: &Worker, b: &Worker) -> (Endpoint, Endpoint) {
    std::thread::scope(|scope| {
        let dialling = scope.spawn(|| a.connect(&b.address(), &ConnectOptions::default()).unwrap());
        let accepted = b.accept(LIMIT).unwrap();
        (dialling.join().unwrap(), accepted)
    })
}

#[test]
fn tasks_run_in_their_order_on_the_worker_s_thread() {
    let pair = pair_of(&[("CROSSRAIL_TLS", "tcp")]);
    let (ran, running) = mpsc::channel();
    for number in 0..100_u8 {
        let (ran, endpoint) = (ran.clone(), pair.ab.clone());
        let task = move || ran.send((std::thread::current().id(), endpoint.send(vec![number], 5))).unwrap();
        pair.a.defer(task).unwrap();
    }
    let received: Vec<_> = (0..100).map(|_| pair.b.recv(vec![0], 5, u64::MAX, None).unwrap()).collect();
    for (number, receive) in received.into_iter().enumerate() {
        receive.wait(LIMIT).unwrap();
        assert_eq!(receive.into_vec(), Some(vec![number as u8]));
        let (thread, sent) = running.recv_timeout(LIMIT.unwrap()).unwrap();
        assert_ne!(thread, std::thread::current().id());
        sent.unwrap().wait(LIMIT).unwrap();
    }
}

#[test]
fn tasks_wait_for_progress_where_no_thread_makes_any_and_run_at_the_end() {
    let worker = Worker::new(
        &context(&[("CROSSRAIL_TLS", "tcp")]),
        WorkerOptions { background: false, ..WorkerOptions::default() },
    )
    .unwrap();
    let (ran, running) = mpsc::channel();
    let defer = |number: u8| {
        let ran = ran.clone();
        worker.defer(move || ran.send(number).unwrap()).unwrap();
    };
    defer(1);
    assert!(running.try_recv().is_err(), "nobody has made progress");
    assert!(worker.progress(), "a task was run");
    assert_eq!(running.try_recv(), Ok(1));
    defer(2);
    worker.close().unwrap();
    assert_eq!(running.try_recv(), Ok(2), "what is left runs when the worker closes");
    defer(3);
    assert_eq!(running.try_recv(), Ok(3), "and at once afterwards");
}

#[test]
fn tasks_keep_their_order_where_several_threads_make_progress() {
    const TASKS: u32 = 2_000;
    let worker = Worker::new(
        &context(&[("CROSSRAIL_TLS", "tcp")]),
        WorkerOptions { background: false, ..WorkerOptions::default() },
    )
    .unwrap();
    let ran = Arc::new(Mutex::new(Vec::new()));
    for number in 0..TASKS {
        let ran = ran.clone();
        let task = move || {
            std::thread::yield_now();
            ran.lock().unwrap().push(number);
        };
        worker.defer(task).unwrap();
    }
    let deadline = Instant::now() + LIMIT.unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while ran.lock().unwrap().len() < TASKS as usize && Instant::now() < deadline {
                    worker.progress();
                }
            });
        }
    });
    assert!(ran.lock().unwrap().iter().copied().eq(0..TASKS), "in another order, or not all");
}

#[test]
fn endpoints_among_which_messages_take_turns_send_longer_ones_with_their_first_frame() {
    let cases = [
        ("127.0.0.1", Turn { index: 0, of: 1, eager_max: 64 << 10 }, "tcp/127.0.0.1", Protocol::Chunks),
        ("127.0.0.1", Turn { index: 0, of: 1, eager_max: 128 << 10 }, "tcp/127.0.0.1", Protocol::Eager),
        ("127.0.0.1,127.0.0.2", Turn { index: 1, of: 2, eager_max: 128 << 10 }, "tcp/127.0.0.2", Protocol::Eager),
        ("127.0.0.1,127.0.0.2", Turn { index: 1, of: 3, eager_max: 128 << 10 }, "tcp/127.0.0.2", Protocol::Chunks),
    ];
    for (rails, turn, small, expected) in cases {
        let context = context(&[("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", rails)]);
        let [a, b] = [(); 2].map(|()| Worker::new(&context, WorkerOptions::default()).unwrap());
        let to_b = a.connect(&b.address(), &ConnectOptions { turn, ..ConnectOptions::default() }).unwrap();
        let to_a = b.accept(LIMIT).unwrap();
        assert_eq!([to_b.explain().small, to_a.explain().small], [small; 2], "{turn:?} over {rails}");
        let sent = pattern(128 << 10, 3);
        let receive = b.recv(vec![0; sent.len()], 1, u64::MAX, None).unwrap();
        let receipt = to_b.send(sent.clone(), 1).unwrap().wait(LIMIT).unwrap();
        assert_eq!(receipt.protocol, expected, "{turn:?} over {rails}");
        receive.wait(LIMIT).unwrap();
        assert_eq!(receive.into_vec(), Some(sent));
    }
}
