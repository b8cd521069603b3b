//! Workers over libfabric: endpoints, one-sided writes, and their ends.
#![allow(unsafe_code)] // exposes and writes memory of the tests, which outlives the objects

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail::placing::{self, Event, Extent, Imm, LaneError, Loan, Placing, Post};
use crossrail::{ConnectOptions, Context, Endpoint, ErrorKind, Settings, Worker, WorkerOptions};

const LIMIT: Duration = Duration::from_secs(20);

fn context(tls: &str) -> Context {
    Context::new(Settings::from_pairs([("CROSSRAIL_TLS", tls)]).unwrap()).unwrap()
}

fn worker(tls: &str, name: &str) -> Worker {
    Worker::new(&context(tls), WorkerOptions { name: Some(name.to_owned()), ..WorkerOptions::default() }).unwrap()
}

/// Two workers over that, joined; `None` where libfabric has no such provider, which is reported.
fn pair(tls: &str) -> Option<((Worker, Endpoint), (Worker, Endpoint))> {
    let row = context(tls).info().unwrap().transports.into_iter().find(|row| row.name == "fabric").expect("a row");
    if !row.usable {
        crossrail_transport::conformance::skip(&row.reason.unwrap_or_default());
        return None;
    }
    let (a, b) = (worker(tls, "alpha"), worker(tls, "beta"));
    let ab = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let ba = b.accept(Some(LIMIT)).unwrap();
    Some(((a, ab), (b, ba)))
}

/// Both ends open it at the same time, as they must.
fn objects(ab: &Endpoint, ba: &Endpoint, index: u16) -> (Box<dyn Placing>, Box<dyn Placing>) {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| placing::open(ba, index, LIMIT));
        let one = placing::open(ab, index, LIMIT).unwrap();
        (one, other.join().expect("no panic").unwrap())
    })
}

#[test]
fn messages_go_over_the_lane_that_explain_names() {
    let Some(((_a, ab), (b, _ba))) = pair("fabric:tcp") else { return };
    let explain = ab.explain();
    assert!(explain.small.starts_with("fabric/lo"), "{explain}");
    for (tag, len) in [(1, 8), (2, 100_000), (3, 5 << 20)] {
        let bytes: Vec<u8> = (0..len as u32).map(|at| ((at * 13) >> 2) as u8).collect();
        let receive = b.recv(vec![0; len], tag, u64::MAX, None).unwrap();
        let send = ab.send(bytes.clone(), tag).unwrap();
        receive.wait(Some(LIMIT)).unwrap();
        let done = send.wait(Some(LIMIT)).unwrap();
        assert!(done.lanes().iter().all(|lane| lane.name.starts_with("fabric/lo")), "{:?}", done.lanes());
        assert!(receive.into_vec().unwrap() == bytes, "tag {tag}");
    }
}

#[test]
fn one_sided_writes_go_over_libfabric_where_it_is_named() {
    let Some(((_a, ab), (_b, ba))) = pair("tcp,fabric:tcp") else { return };
    for index in [0, 5] {
        let (mut one, mut two) = objects(&ab, &ba, index);
        assert_eq!((one.peer(), two.peer()), ("beta", "alpha"));
        assert!(one.rails()[0].name.starts_with("fabric/tcp"), "{:?}", one.rails());
        let bytes: Vec<u8> = (0..20 << 20).map(|at: u32| ((at * 7) >> 3) as u8).collect();
        let mut heap = vec![0u8; bytes.len()];
        let memory = Extent::host(heap.as_mut_ptr(), heap.len());
        // SAFETY: the objects are dropped before the memory.
        let key = unsafe { two.expose(&memory, &Arc::new(Loan::default())) }.unwrap();
        let imm = Imm { counter: two.count(1).unwrap(), piece: 0 };
        // SAFETY: as above.
        let posted = unsafe { one.write(&[Extent::host(bytes.as_ptr(), bytes.len())], &key, 0, imm, 3) };
        assert_eq!(posted, Ok(Post::Held));
        let (mut arrived, mut ended) = (0, 0);
        let start = Instant::now();
        while (arrived, ended) != (1, 1) {
            one.poll(&mut |event| ended += u32::from(event == Event::Ended { token: 3, result: Ok(()) })).unwrap();
            two.poll(&mut |event| arrived += u32::from(event == Event::Arrived(imm))).unwrap();
            assert!(start.elapsed() < LIMIT, "{arrived} {ended}");
        }
        drop((one, two));
        assert!(heap == bytes, "index {index}");
    }
}

#[test]
fn the_end_of_an_endpoint_ends_its_objects_at_both_ends() {
    let Some(((_a, ab), (_b, ba))) = pair("tcp,fabric:tcp") else { return };
    let (mut one, mut two) = objects(&ab, &ba, 0);
    ab.close(Some(LIMIT)).unwrap();
    let until_error = |object: &mut Box<dyn Placing>| {
        let start = Instant::now();
        loop {
            match object.poll(&mut |_| {}) {
                Ok(_) => assert!(start.elapsed() < LIMIT, "no error"),
                Err(error) => return error,
            }
        }
    };
    let error = until_error(&mut one);
    assert!(matches!(&error, LaneError::Closed(why) if why.contains("beta") && why.contains("closed")), "{error}");
    let error = until_error(&mut two);
    assert!(matches!(&error, LaneError::Closed(why) if why.contains("alpha")), "{error}");
}

#[test]
fn an_unknown_provider_is_named() {
    let (a, b) = (worker("fabric:nonesuch", "alpha"), worker("fabric:nonesuch", "beta"));
    let error = a.connect(&b.address(), &ConnectOptions::default()).map(drop).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
    let text = error.to_string();
    assert!(text.contains("nonesuch") || text.contains("not installed"), "{text}");
}
