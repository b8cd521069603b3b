//! Memory of one worker, mapped by another: in this process and in a second one, which is killed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crossrail::{
    ConnectOptions, Context, Endpoint, ErrorKind, Mapped, Memory, Reason, Settings, Shared, Worker, WorkerOptions,
};

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));
const SHORT: Option<Duration> = Some(Duration::from_millis(60));

struct End {
    context: Context,
    worker: Worker,
}

fn end(tls: &str) -> End {
    let context = Context::new(Settings::from_pairs([("CROSSRAIL_TLS", tls)]).unwrap()).unwrap();
    let worker = Worker::new(&context, WorkerOptions::default()).unwrap();
    End { context, worker }
}

fn join(from: &End, to: &End) -> (Endpoint, Endpoint) {
    let there = from.worker.connect(&to.worker.address(), &ConnectOptions::default()).unwrap();
    (there, to.worker.accept(LIMIT).unwrap())
}

fn handed_over(shared: &Shared) -> Shared {
    Shared::from_bytes(&shared.to_bytes()).unwrap()
}

fn word(memory: &Memory, at: usize) -> u64 {
    let mut bytes = [0; 8];
    memory.copy_to(at, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

fn word_of(mapped: &Mapped, at: usize) -> u64 {
    let mut bytes = [0; 8];
    mapped.copy_to(at, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

fn until(mut reached: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT.unwrap();
    while !reached() {
        assert!(Instant::now() < limit, "it never came");
        std::thread::yield_now();
    }
}

/// Mappings of segments of this process, and open descriptors.
fn kept() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let segments = maps.lines().filter(|line| line.contains("memfd:crossrail-segment")).count();
    (segments, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

#[test]
fn both_ends_see_the_same_bytes_and_a_map_outlives_its_owner() {
    let (a, b) = (end("shm"), end("shm"));
    let (ab, ba) = join(&a, &b);
    let memory = a.context.alloc(10_000).unwrap();
    memory.fill_from(0, &7u64.to_le_bytes()).unwrap();
    let shared = ab.share(&memory).unwrap();
    assert_eq!((shared.len(), &ab.share(&memory).unwrap()), (10_000, &shared));
    let mapped = ba.map(&handed_over(&shared), LIMIT).unwrap();
    assert_eq!((mapped.len(), word_of(&mapped, 0)), (10_000, 7));
    assert_ne!(mapped.ptr(), memory.ptr());
    mapped.fill_from(9_992, &8u64.to_le_bytes()).unwrap();
    assert_eq!(word(&memory, 9_992), 8);
    assert_eq!(mapped.fill_from(9_993, &[0; 8]).unwrap_err().kind, ErrorKind::Usage);
    let again = ba.map(&shared, SHORT).unwrap();
    assert_eq!(ba.map_on(&shared, Some(0), SHORT).unwrap_err().kind, ErrorKind::Usage, "the host's memory");
    assert_eq!(again.ptr(), mapped.ptr());

    drop(memory);
    until(|| ba.map(&shared, SHORT).is_err_and(|error| error.kind == ErrorKind::Region));
    assert_eq!((word_of(&again, 0), word_of(&mapped, 9_992)), (7, 8));
    ba.close(LIMIT).unwrap();
    drop((a, ab, ba, b));
    mapped.fill_from(0, &9u64.to_le_bytes()).unwrap();
    assert_eq!(word_of(&again, 0), 9);
}

#[test]
fn the_description_may_come_before_the_memory() {
    let (a, b) = (end("shm"), end("shm"));
    let (ab, ba) = join(&a, &b);
    let (first, second) = (a.context.alloc(4096).unwrap(), a.context.alloc(64).unwrap());
    // The same but for the segment's id, which counts up.
    let mut bytes = ab.share(&first).unwrap().to_bytes();
    ba.map(&ab.share(&first).unwrap(), LIMIT).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            bytes[4..12].copy_from_slice(&64u64.to_le_bytes());
            bytes[16] += 1;
            let guess = Shared::from_bytes(&bytes).unwrap();
            ba.map(&guess, LIMIT)
        });
        // Asleep by then: only the descriptor's arrival can wake it.
        std::thread::sleep(Duration::from_millis(20));
        let began = Instant::now();
        let shared = ab.share(&second).unwrap();
        // The identity was a guess; that it is refused says that the descriptor has come.
        let error = waiting.join().unwrap().unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{error}");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        ba.map(&shared, LIMIT).unwrap();
    });
}

#[test]
fn only_the_peer_it_was_shared_with_can_map_it() {
    let (a, b, c) = (end("shm"), end("shm"), end("shm"));
    let ((ab, ba), (ac, ca)) = (join(&a, &b), join(&a, &c));
    let memory = a.context.alloc(4096).unwrap();
    let shared = ab.share(&memory).unwrap();
    let error = ca.map(&shared, SHORT).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert_eq!(error.peer.as_deref(), Some(ca.peer().as_str()));
    // A segment of the same number, of another worker: stale descriptions are noticed.
    let other = b.context.alloc(4096).unwrap();
    let others = ba.share(&other).unwrap();
    let error = ab.map(&shared, SHORT).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Region, "{error}");
    ab.map(&others, LIMIT).unwrap();
    // Longer than it is, elsewhere in it, of another kind.
    let beyond: [&[(usize, u8)]; 3] = [&[(6, 1)], &[(20, 1), (21, 16)], &[(12, 2)]];
    for spoilt in beyond {
        let mut bytes = shared.to_bytes();
        spoilt.iter().for_each(|(at, value)| bytes[*at] = *value);
        let error = ba.map(&Shared::from_bytes(&bytes).unwrap(), SHORT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Region, "{error}");
    }
    assert_eq!(Shared::from_bytes(&shared.to_bytes()[..35]).unwrap_err().kind, ErrorKind::Usage);
    assert_eq!(Shared::from_bytes(&[]).unwrap_err().kind, ErrorKind::Usage);
    let error = ab.share(&other).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    ba.map(&shared, LIMIT).unwrap();
    drop(ac);
}

#[test]
fn other_transports_refuse_by_name() {
    let shm = end("all");
    let memory = shm.context.alloc(4096).unwrap();
    let myself = shm.worker.connect(&shm.worker.address(), &ConnectOptions::default()).unwrap();
    let (a, b) = (end("tcp"), end("tcp"));
    let (ab, ba) = join(&a, &b);
    let mine = a.context.alloc(4096).unwrap();
    let (shm_a, shm_b) = (end("shm"), end("shm"));
    let (there, _back) = join(&shm_a, &shm_b);
    let shared = there.share(&shm_a.context.alloc(64).unwrap()).unwrap();
    for (refused, uses) in [
        (ab.share(&mine).map(drop), "tcp"),
        (ba.map(&shared, SHORT).map(drop), "tcp"),
        (myself.share(&memory).map(drop), "self"),
        (myself.map(&shared, SHORT).map(drop), "self"),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported, "{error}");
        assert!(error.detail.ends_with(&format!("uses {uses}")), "{error}");
    }
    there.close(LIMIT).unwrap();
    let closed = there.map(&shared, LIMIT).unwrap_err();
    assert_eq!((closed.kind, closed.reason), (ErrorKind::PeerDead, Some(Reason::Closed)), "{closed}");
    shm_a.worker.close().unwrap();
    assert_eq!(there.map(&shared, LIMIT).unwrap_err().kind, ErrorKind::Closed);
}

#[test]
fn many_segments_are_shared_although_the_socket_is_small() {
    let (a, b) = (end("shm"), end("shm"));
    let (ab, ba) = join(&a, &b);
    let all: Vec<Memory> = (0..400).map(|_| a.context.alloc(4096).unwrap()).collect();
    let shared: Vec<Shared> = all.iter().map(|memory| ab.share(memory).unwrap()).collect();
    for (at, shared) in shared.iter().enumerate() {
        ba.map(shared, LIMIT).unwrap().fill_from(0, &(at as u64).to_le_bytes()).unwrap();
    }
    assert!(all.iter().enumerate().all(|(at, memory)| word(memory, 0) == at as u64));
}

const ADDRESS: &str = "CROSSRAIL_TEST_MAPPED_ADDRESS";

#[test]
#[ignore = "the child of a_killed_peers_memory_stays_readable"]
fn role_shares_and_waits() {
    let Ok(address) = std::env::var(ADDRESS) else { return };
    let bytes: Vec<u8> = address.split(',').map(|byte| byte.parse().unwrap()).collect();
    let me = end("shm");
    let endpoint = me.worker.connect(&bytes, &ConnectOptions::default()).unwrap();
    let memory = me.context.alloc(1 << 30).unwrap();
    memory.fill_from(0, &11u64.to_le_bytes()).unwrap();
    let shared = endpoint.share(&memory).unwrap().to_bytes();
    let line: Vec<String> = shared.iter().map(u8::to_string).collect();
    println!("\nshared {}", line.join(","));
    until(|| word(&memory, 512 << 20) == 12);
    println!("seen");
    std::io::stdout().flush().unwrap();
    // Until it is killed, or its parent is no more.
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn child(address: &[u8]) -> Child {
    let address: Vec<String> = address.iter().map(u8::to_string).collect();
    let line = ["role_shares_and_waits", "--exact", "--ignored", "--nocapture"];
    Command::new(std::env::current_exe().unwrap())
        .args(line)
        .env(ADDRESS, address.join(","))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_killed_peers_memory_stays_readable() {
    let me = end("shm");
    let mut child = child(&me.worker.address());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let endpoint = me.worker.accept(LIMIT).unwrap();
    let shared = lines.find_map(|line| line.strip_prefix("shared ").map(str::to_owned)).unwrap();
    let shared: Vec<u8> = shared.split(',').map(|byte| byte.parse().unwrap()).collect();
    let shared = Shared::from_bytes(&shared).unwrap();
    let mapped = endpoint.map(&shared, LIMIT).unwrap();
    assert_eq!((mapped.len(), word_of(&mapped, 0)), (1 << 30, 11));
    mapped.fill_from(512 << 20, &12u64.to_le_bytes()).unwrap();
    assert!(lines.any(|line| line == "seen"));
    // Somebody who waits for memory hears of the death, not of the time.
    let mut never = shared.to_bytes();
    never[16] += 1;
    let never = Shared::from_bytes(&never).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| endpoint.map(&never, LIMIT));
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        let error = waiting.join().unwrap().unwrap_err();
        assert_eq!(error.kind, ErrorKind::PeerDead, "{error}");
        // Its end is seen on the control connection or on the lane, whichever is first.
        assert!(matches!(error.reason, Some(Reason::ProcessEnded | Reason::LanesLost)), "{error:?}");
    });
    assert_eq!(endpoint.map(&shared, LIMIT).unwrap_err().kind, ErrorKind::PeerDead);
    assert_eq!((word_of(&mapped, 0), word_of(&mapped, 512 << 20)), (11, 12));
    mapped.fill_from(1 << 29, &13u64.to_le_bytes()).unwrap();
    assert_eq!(word_of(&mapped.clone(), 1 << 29), 13);
}

#[test]
#[ignore = "alone in its process: run by nothing_is_left_behind"]
fn role_counts() {
    let use_them = || {
        let (a, b) = (end("shm"), end("shm"));
        let (ab, ba) = join(&a, &b);
        let memory: Vec<Memory> = (0..4).map(|_| a.context.alloc(1 << 20).unwrap()).collect();
        let shared: Vec<Shared> = memory.iter().map(|memory| ab.share(memory).unwrap()).collect();
        // One is mapped twice, one outlives its owner, one is never mapped.
        let maps: Vec<Mapped> = [0, 0, 1, 2].iter().map(|at| ba.map(&shared[*at], LIMIT).unwrap()).collect();
        maps[3].fill_from(0, &[1; 8]).unwrap();
        drop((memory, ab, ba, a, b));
        assert_eq!(kept().0, 3);
        drop(maps);
        assert_eq!(kept().0, 0);
    };
    use_them();
    let before = kept();
    (0..10).for_each(|_| use_them());
    assert_eq!(kept(), before);
}

#[test]
fn nothing_is_left_behind() {
    let line = ["role_counts", "--exact", "--ignored", "--nocapture"];
    assert!(Command::new(std::env::current_exe().unwrap()).args(line).status().unwrap().success());
}
