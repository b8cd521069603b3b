//! Staging on a simulated GPU: order, slots, failures, and the end in every state.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_shm::Arena;
use crossrail_types::{ErrorKind, Settings};

use super::{Completion, Slot, StagingListener, StagingQueue};
use crate::device::{Device, DeviceAlloc, Devices};
use crate::direction::Direction;
use crate::simulated::Simulated;

const LIMIT: Duration = Duration::from_secs(10);
const CHUNK: usize = 64 << 10;
/// Slots each way.
const SLOTS: usize = 4;

fn settings() -> Settings {
    Settings { chunk: CHUNK, bounce: 2 * SLOTS * CHUNK, timeout: LIMIT, ..Settings::default() }
}

/// What was told, in order.
#[derive(Default)]
struct Told {
    done: Mutex<VecDeque<Completion>>,
    free: Mutex<u32>,
    changed: Condvar,
}

impl StagingListener for Told {
    fn completed(&self, done: Vec<Completion>) -> bool {
        if done.is_empty() {
            *self.free.lock() += 1;
        }
        self.done.lock().extend(done);
        self.changed.notify_all();
        true
    }
}

impl Told {
    fn next(&self) -> Completion {
        let deadline = Instant::now() + LIMIT;
        let mut done = self.done.lock();
        while done.is_empty() {
            assert!(!self.changed.wait_until(&mut done, deadline).timed_out(), "nothing was told");
        }
        done.pop_front().expect("just looked")
    }

    fn await_free(&self, count: u32) {
        let deadline = Instant::now() + LIMIT;
        let mut done = self.done.lock();
        while *self.free.lock() < count {
            assert!(!self.changed.wait_until(&mut done, deadline).timed_out(), "no free slot was told");
        }
    }
}

struct Bed {
    gpu: Simulated,
    device: Arc<Device>,
    devices: Arc<Devices>,
    told: Arc<Told>,
    queue: StagingQueue,
}

fn bed() -> Bed {
    bed_with(&settings())
}

fn bed_with(settings: &Settings) -> Bed {
    let devices = Devices::simulated(settings, Arena::new(), 2);
    let (gpu, device) = (devices.simulation(0).unwrap(), devices.device(0).unwrap());
    let told = Arc::new(Told::default());
    let queue = device.stager().unwrap().attach(Arc::downgrade(&told) as Weak<dyn StagingListener>);
    Bed { gpu, device, devices, told, queue }
}

impl Bed {
    fn alloc(&self, len: usize) -> DeviceAlloc {
        self.devices.alloc(0, len).unwrap()
    }

    fn filled(&self, bytes: &[u8]) -> DeviceAlloc {
        let memory = self.alloc(bytes.len());
        self.device.copy_in(memory.ptr(), bytes).unwrap();
        memory
    }

    fn slot(&self, way: Direction) -> Slot {
        self.queue.slot(way, CHUNK).expect("a free slot")
    }

    /// An In slot that holds `bytes`, as a lane leaves it.
    fn arrived(&self, bytes: &[u8]) -> Slot {
        let slot = self.slot(Direction::In);
        // SAFETY: the slot is ours and long enough.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.ptr(), bytes.len()) };
        slot
    }

    fn bytes(&self, memory: &DeviceAlloc) -> Vec<u8> {
        let mut bytes = vec![0; memory.len()];
        self.device.copy_out(memory.ptr(), &mut bytes).unwrap();
        bytes
    }

    /// Waits until the GPU has all that was put in.
    fn all_begun(&self) {
        let deadline = Instant::now() + LIMIT;
        while self.queue.queued() > 0 {
            assert!(Instant::now() < deadline, "not begun");
            std::thread::yield_now();
        }
    }

    /// Every slot comes back; one may still be with what is just being told.
    fn all_come_back(&self) {
        let deadline = Instant::now() + LIMIT;
        while (self.free(Direction::Out), self.free(Direction::In)) != (SLOTS, SLOTS) {
            assert!(Instant::now() < deadline, "a slot is lost");
            self.told.done.lock().clear();
            std::thread::yield_now();
        }
    }

    fn free(&self, way: Direction) -> usize {
        let taken: Vec<Slot> = std::iter::from_fn(|| self.queue.slot(way, CHUNK)).collect();
        taken.len()
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

fn held(slot: &Slot, len: usize) -> &[u8] {
    // SAFETY: the slot is the caller's, and as long as that.
    unsafe { std::slice::from_raw_parts(slot.ptr(), len) }
}

#[test]
fn bytes_go_out_and_come_in() {
    let bed = bed();
    for (round, (offset, len)) in [(0, CHUNK), (1, 1), (3, 4097), (17, CHUNK - 3)].into_iter().enumerate() {
        let ticket = 2 * round as u64;
        let sent = pattern(CHUNK + 64, round as u8);
        let source = bed.filled(&sent);
        bed.queue.pack(ticket, source.ptr() + offset as u64, bed.slot(Direction::Out), len);
        let done = bed.told.next();
        done.result.unwrap();
        assert_eq!(done.ticket, ticket);
        let slot = done.slot.expect("a pack's slot comes back");
        assert_eq!(held(&slot, len), &sent[offset..offset + len]);

        let target = bed.alloc(CHUNK + 64);
        let slot = bed.arrived(&sent[..len]);
        bed.queue.unpack(ticket + 1, slot, target.ptr() + offset as u64, len);
        let done = bed.told.next();
        assert!(done.result.is_ok() && done.slot.is_none() && done.ticket == ticket + 1);
        let mut expected = vec![0; CHUNK + 64];
        expected[offset..offset + len].copy_from_slice(&sent[..len]);
        assert_eq!(bed.bytes(&target), expected);
    }
    let stats = bed.device.stager().unwrap().stats();
    assert_eq!((stats.packed, stats.unpacked), ((2 * CHUNK + 4095) as u64, (2 * CHUNK + 4095) as u64));
    assert_eq!(stats.batches, 4);
    bed.all_come_back();
}

#[test]
fn each_way_has_slots_of_its_own() {
    let bed = bed();
    let out: Vec<Slot> = (0..SLOTS).map(|_| bed.slot(Direction::Out)).collect();
    assert!(bed.queue.slot(Direction::Out, CHUNK).is_none());
    let inward: Vec<Slot> = (0..SLOTS).map(|_| bed.slot(Direction::In)).collect();
    assert!(bed.queue.slot(Direction::In, CHUNK).is_none());
    let mut starts: Vec<usize> = out.iter().chain(&inward).map(|slot| slot.ptr() as usize).collect();
    starts.sort_unstable();
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= CHUNK), "slots overlap");
    drop(out);
    assert!(bed.queue.slot(Direction::In, CHUNK).is_none(), "a slot of the other way is not free");
    assert_eq!(bed.free(Direction::Out), SLOTS);
    let stats = bed.device.stager().unwrap().stats();
    assert!(stats.out_slot_ns > 0 && stats.in_slot_ns > 0, "{stats:?}");
}

#[test]
fn a_slot_is_free_only_when_the_unpack_that_reads_it_is_complete() {
    let bed = bed();
    let target = bed.alloc(SLOTS * CHUNK);
    bed.gpu.hold_unpacks(true);
    for i in 0..SLOTS as u64 {
        let slot = bed.arrived(&pattern(CHUNK, i as u8));
        bed.queue.unpack(i, slot, target.ptr() + i * CHUNK as u64, CHUNK);
    }
    bed.queue.notify_when_free(Direction::In, CHUNK);
    assert!(bed.queue.slot(Direction::In, CHUNK).is_none());
    assert_eq!(*bed.told.free.lock(), 0);
    bed.gpu.hold_unpacks(false);
    bed.told.await_free(1);
    for i in 0..SLOTS as u64 {
        assert_eq!(bed.told.next().ticket, i, "in the order in which they were put in");
    }
    assert_eq!(bed.free(Direction::In), SLOTS);
    // With a slot free, the answer comes at once.
    bed.queue.notify_when_free(Direction::In, CHUNK);
    bed.told.await_free(2);
    let sent: Vec<u8> = (0..SLOTS).flat_map(|i| pattern(CHUNK, i as u8)).collect();
    assert_eq!(bed.bytes(&target), sent);
}

#[test]
fn short_chunks_share_the_memory_of_long_ones() {
    let bed = bed();
    let target = bed.alloc(SLOTS * CHUNK);
    let sent: Vec<u8> = (0..SLOTS).flat_map(|i| pattern(CHUNK, i as u8)).collect();
    bed.gpu.hold_unpacks(true);
    for (part, at) in sent.chunks(4096).zip((target.ptr()..).step_by(4096)) {
        let slot = bed.queue.slot(Direction::In, 4096).expect("a slot as long as the memory lasts");
        // SAFETY: the slot is ours and long enough.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), slot.ptr(), 4096) };
        bed.queue.unpack(at, slot, at, 4096);
    }
    assert!(bed.queue.slot(Direction::In, 1).is_none());
    bed.gpu.hold_unpacks(false);
    sent.chunks(4096).for_each(|_| bed.told.next().result.unwrap());
    assert_eq!(bed.bytes(&target), sent);
}

#[test]
fn a_client_hears_of_a_slot_that_another_gives_back() {
    let bed = bed();
    let other = Arc::new(Told::default());
    let second = bed.device.stager().unwrap().attach(Arc::downgrade(&other) as Weak<dyn StagingListener>);
    let mut slots: Vec<Slot> = (0..SLOTS).map(|_| bed.slot(Direction::Out)).collect();
    assert!(second.slot(Direction::Out, CHUNK).is_none());
    second.notify_when_free(Direction::Out, CHUNK);
    second.notify_when_free(Direction::Out, CHUNK);
    drop(bed.slot(Direction::In));
    assert_eq!(*other.free.lock(), 0, "it waits for a slot of the other way");
    drop(slots.pop());
    other.await_free(1);
    drop(second.slot(Direction::Out, CHUNK).expect("just told"));
    drop(slots);
    // What was asked for once is told once.
    bed.queue.notify_when_free(Direction::Out, CHUNK);
    bed.told.await_free(1);
    assert_eq!(*other.free.lock(), 1);
}

#[test]
fn what_is_ready_together_goes_together() {
    let bed = bed_with(&Settings { bounce: 2 * 16 * CHUNK, ..settings() });
    let target = bed.alloc(16 * CHUNK);
    bed.gpu.hold_unpacks(true);
    for i in 0..16_u64 {
        bed.queue.unpack(i, bed.slot(Direction::In), target.ptr() + i * CHUNK as u64, CHUNK);
        if i < 2 {
            bed.all_begun();
        }
    }
    bed.gpu.hold_unpacks(false);
    for i in 0..16 {
        assert_eq!(bed.told.next().ticket, i);
    }
    assert_eq!(bed.device.stager().unwrap().stats().batches, 3, "two that found the GPU idle, and the rest");
}

#[test]
fn packs_go_on_while_unpacks_are_stuck() {
    let bed = bed();
    let memory = bed.filled(&pattern(CHUNK, 1));
    bed.gpu.hold_unpacks(true);
    bed.queue.unpack(1, bed.slot(Direction::In), memory.ptr(), CHUNK);
    for ticket in 2..20 {
        bed.queue.pack(ticket, memory.ptr(), bed.slot(Direction::Out), CHUNK);
        assert_eq!(bed.told.next().ticket, ticket);
    }
    bed.gpu.hold_unpacks(false);
    assert_eq!(bed.told.next().ticket, 1);
}

#[test]
fn a_failing_copy_fails_its_ticket_and_the_next_one_works() {
    let bed = bed();
    let memory = bed.filled(&pattern(CHUNK, 1));
    bed.gpu.fail_packs(1, "the link is down");
    bed.queue.pack(1, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    let done = bed.told.next();
    let error = done.result.unwrap_err();
    assert!(error.detail.contains("the link is down"), "{error}");
    assert!(done.slot.is_some());
    drop(done.slot);
    bed.queue.pack(2, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    bed.told.next().result.unwrap();

    bed.gpu.fail_unpacks(1, "the kernel is lost");
    bed.queue.unpack(3, bed.slot(Direction::In), memory.ptr(), CHUNK);
    let done = bed.told.next();
    assert!(done.result.unwrap_err().detail.contains("the kernel is lost"));
    bed.queue.unpack(4, bed.slot(Direction::In), memory.ptr(), CHUNK);
    bed.told.next().result.unwrap();
    bed.all_come_back();
}

#[test]
fn memory_that_is_gone_fails_its_own_ticket_only() {
    let bed = bed();
    let (kept, gone) = (bed.alloc(CHUNK), bed.alloc(CHUNK));
    let old = gone.ptr();
    bed.gpu.hold_unpacks(true);
    bed.queue.unpack(1, bed.arrived(&pattern(CHUNK, 1)), kept.ptr(), CHUNK);
    bed.queue.unpack(2, bed.arrived(&pattern(CHUNK, 2)), kept.ptr(), CHUNK);
    drop(gone);
    bed.queue.unpack(3, bed.arrived(&pattern(CHUNK, 3)), old, CHUNK);
    bed.queue.unpack(4, bed.arrived(&pattern(CHUNK, 4)), kept.ptr(), CHUNK);
    bed.gpu.hold_unpacks(false);
    let mut done: Vec<Completion> = (0..4).map(|_| bed.told.next()).collect();
    done.sort_by_key(|done| done.ticket);
    let results: Vec<bool> = done.iter().map(|done| done.result.is_ok()).collect();
    assert_eq!(results, [true, true, false, true]);
    let error = done[2].result.as_ref().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Usage, "{error}");
    assert_eq!(bed.bytes(&kept), pattern(CHUNK, 4));
    bed.queue.pack(5, old, bed.slot(Direction::Out), 1);
    assert!(bed.told.next().result.is_err());
}

#[test]
fn quiesce_drops_what_is_not_begun_and_waits_for_the_rest() {
    let bed = bed();
    let memory = bed.alloc(SLOTS * CHUNK);
    let stream = bed.gpu.stream();
    stream.put_in();
    // SAFETY: the stream is alive.
    bed.queue.wait_for(7, unsafe { bed.device.stream_point(stream.handle()).unwrap() });
    bed.gpu.hold_unpacks(true);
    bed.gpu.hold_packs(true);
    for ticket in 0..3 {
        // Each may be a batch of its own, and the GPU has two batches at once.
        if ticket < 2 {
            bed.queue.unpack(ticket, bed.slot(Direction::In), memory.ptr(), CHUNK);
        }
        bed.queue.pack(10 + ticket, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    }
    // Nothing of ticket 99 is there: returns at once, though everything is held.
    bed.queue.quiesce(|ticket| ticket == 99).unwrap();
    bed.all_begun();
    bed.queue.unpack(20, bed.slot(Direction::In), memory.ptr(), CHUNK);
    // The GPU goes on once the quiesce has come to what it is at.
    let go_on = |ticket| {
        if ticket == 12 {
            bed.gpu.hold_unpacks(false);
            bed.gpu.hold_packs(false);
        }
        ticket != 1 && ticket != 11
    };
    bed.queue.quiesce(go_on).unwrap();
    let mut left = vec![bed.told.next(), bed.told.next()];
    left.sort_by_key(|done| done.ticket);
    assert_eq!(left.iter().map(|done| done.ticket).collect::<Vec<_>>(), [1, 11]);
    drop(left);
    stream.finish();
    bed.queue.pack(30, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    assert_eq!(bed.told.next().ticket, 30, "nothing of what was given up is told");
    bed.all_come_back();
}

#[test]
fn a_quiesce_that_does_not_end_says_so_and_keeps_the_slots() {
    let bed = bed_with(&Settings { timeout: Duration::from_millis(50), ..settings() });
    let memory = bed.alloc(CHUNK);
    bed.gpu.hold_unpacks(true);
    bed.queue.unpack(1, bed.slot(Direction::In), memory.ptr(), CHUNK);
    bed.queue.unpack(2, bed.slot(Direction::In), memory.ptr(), CHUNK);
    bed.all_begun();
    let error = bed.queue.quiesce(|_| true).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    assert!(bed.free(Direction::In) < SLOTS);
    bed.gpu.hold_unpacks(false);
    let deadline = Instant::now() + LIMIT;
    while let Err(error) = bed.queue.quiesce(|_| true) {
        assert!(Instant::now() < deadline, "{error}");
    }
    assert_eq!(bed.free(Direction::In), SLOTS);
    assert!(bed.told.done.lock().is_empty());
}

#[test]
fn an_event_is_told_once_it_is_complete() {
    let bed = bed();
    let stream = bed.gpu.stream();
    // SAFETY: the streams are alive.
    let ready = |handle| unsafe { bed.device.stream_point(handle) };
    bed.queue.wait_for(1, ready(0).unwrap());
    assert_eq!(bed.told.next().ticket, 1);
    stream.put_in();
    bed.queue.wait_for(2, ready(stream.handle()).unwrap());
    bed.queue.wait_for(3, ready(0).unwrap());
    assert_eq!(bed.told.next().ticket, 3);
    assert!(bed.told.done.lock().is_empty());
    stream.finish();
    assert_eq!(bed.told.next().ticket, 2);
    assert_eq!(ready(12345).unwrap_err().kind, ErrorKind::Usage);
}

#[test]
fn clients_do_not_see_each_other() {
    let bed = bed();
    let other = Arc::new(Told::default());
    let second = bed.device.stager().unwrap().attach(Arc::downgrade(&other) as Weak<dyn StagingListener>);
    let memory = bed.alloc(CHUNK);
    bed.gpu.hold_packs(true);
    bed.queue.pack(1, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    second.pack(1, memory.ptr(), bed.slot(Direction::Out), CHUNK / 2);
    bed.all_begun();
    std::thread::scope(|scope| {
        let dropping = scope.spawn(|| drop(second));
        bed.gpu.hold_packs(false);
        dropping.join().unwrap();
    });
    assert_eq!(bed.told.next().ticket, 1);
    other.done.lock().clear();
    assert_eq!(bed.device.stager().unwrap().stats().packed, (CHUNK + CHUNK / 2) as u64);
    bed.all_come_back();
}

#[test]
fn a_sink_may_be_the_last_to_hold_everything() {
    /// Drops its queue, and with it the thread, on the thread.
    struct Last(Mutex<Option<(StagingQueue, Arc<Device>)>>, std::sync::mpsc::Sender<()>);
    impl StagingListener for Last {
        fn completed(&self, _done: Vec<Completion>) -> bool {
            let held = self.0.lock().take();
            drop(held);
            let _ = self.1.send(());
            true
        }
    }
    let devices = Devices::simulated(&settings(), Arena::new(), 1);
    let device = devices.device(0).unwrap();
    let memory = devices.alloc(0, CHUNK).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let sink = Arc::new(Last(Mutex::new(None), tell));
    let queue = device.stager().unwrap().attach(Arc::downgrade(&sink) as Weak<dyn StagingListener>);
    for ticket in 0..3 {
        queue.unpack(ticket, queue.slot(Direction::In, CHUNK).unwrap(), memory.ptr(), CHUNK);
    }
    *sink.0.lock() = Some((queue, device));
    drop((devices, memory));
    told.recv_timeout(LIMIT).expect("told");
}

#[test]
fn bounce_memory_that_cannot_be_is_a_setting_to_change() {
    let too_small = (3 * CHUNK, ErrorKind::Config, "256K or more");
    let too_large = (1 << 50, ErrorKind::Exhausted, "CROSSRAIL_BOUNCE says how much bounce memory there is");
    for (bounce, kind, says) in [too_small, too_large] {
        let devices = Devices::simulated(&Settings { bounce, ..settings() }, Arena::new(), 1);
        let error = devices.device(0).unwrap().stager().err().expect("no such memory");
        assert_eq!(error.kind, kind);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[test]
fn memory_that_is_not_the_devices_is_refused_by_name() {
    let bed = bed();
    let memory = bed.alloc(100);
    bed.devices.check(memory.ptr(), 100, 0).unwrap();
    bed.devices.check(0, 0, 1).unwrap();
    let host = [0_u8; 16];
    for (ptr, len, ordinal) in
        [(memory.ptr(), 100, 1), (memory.ptr(), 1 << 20, 0), (host.as_ptr() as u64, 16, 0), (u64::MAX, 2, 0)]
    {
        let error = bed.devices.check(ptr, len, ordinal).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage, "{error}");
        assert!(error.to_string().contains(&format!("cuda:{ordinal}")), "{error}");
    }
    assert_eq!(bed.devices.check(memory.ptr(), 1, 2).unwrap_err().kind, ErrorKind::Usage);
    bed.gpu.set_memory(1 << 20);
    let error = bed.devices.alloc(0, 2 << 20).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Exhausted);
    assert!(error.detail.contains("requested") && error.detail.contains("free"), "{error}");
    drop(memory);
    assert_eq!(bed.gpu.allocated(), 0);
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Runs `test` again in a process where no other test runs; `true` there.
fn alone(test: &str) -> bool {
    const CHILD: &str = "STAGING_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let name = format!("staging::tests::{test}");
    let output = command.args(["--exact", &name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
    false
}

#[test]
fn nothing_is_left_behind() {
    if !alone("nothing_is_left_behind") {
        return;
    }
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("crossrail-").count();
    let before = (threads(), descriptors(), mappings());
    for round in 0..4 {
        let bed = bed();
        let memory = bed.alloc(CHUNK);
        for ticket in 0..3 {
            bed.queue.pack(ticket, memory.ptr(), bed.slot(Direction::Out), CHUNK);
            bed.queue.unpack(10 + ticket, bed.slot(Direction::In), memory.ptr(), CHUNK);
        }
        assert_eq!(threads(), before.0 + 2, "one that stages, one that is the GPU");
        assert!(mappings() > before.2);
        if round % 2 == 0 {
            bed.queue.quiesce(|_| true).unwrap();
        }
    }
    // The kernel lists a thread for a moment after it was joined.
    let until = Instant::now() + Duration::from_secs(10);
    while threads() > before.0 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!((threads(), descriptors(), mappings()), before);
}

#[test]
fn an_idle_stager_sleeps() {
    if !alone("an_idle_stager_sleeps") {
        return;
    }
    let bed = bed();
    let memory = bed.alloc(CHUNK);
    bed.queue.pack(1, memory.ptr(), bed.slot(Direction::Out), CHUNK);
    drop(bed.told.next());
    let deadline = Instant::now() + LIMIT;
    loop {
        let before = switches("stage cuda").expect("the thread is there");
        std::thread::sleep(Duration::from_millis(20));
        if switches("stage cuda").is_some_and(|now| (1..=before + 1).contains(&now)) {
            break;
        }
        assert!(Instant::now() < deadline, "it does not sleep");
    }
}

/// How often the thread of that name has stopped and gone on; `None` if there is none.
fn switches(name: &str) -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let own = tasks.filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|found| found.contains(name)));
    let status = own.filter_map(|task| std::fs::read_to_string(task.join("status")).ok());
    status.map(|text| text.lines().filter_map(count).sum()).next()
}

fn count(line: &str) -> Option<u64> {
    line.split_once("voluntary_ctxt_switches:")?.1.trim().parse().ok()
}

/// Everything at once, again and again: what is not given up is told once, and every slot comes back.
#[test]
fn whatever_is_given_up_when_the_rest_is_told() {
    const ROUNDS: u64 = 200;
    let bed = bed();
    let memory = bed.alloc(CHUNK);
    let mut number = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |below: u64| {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
        number % below
    };
    for round in 0..ROUNDS {
        let first = round * 100;
        bed.gpu.hold_packs(random(2) == 0);
        bed.gpu.hold_unpacks(random(2) == 0);
        let mut tickets = Vec::new();
        for ticket in first..first + 2 * SLOTS as u64 {
            let way = if random(2) == 0 { Direction::Out } else { Direction::In };
            let Some(slot) = bed.queue.slot(way, CHUNK) else { continue };
            match way {
                Direction::Out => bed.queue.pack(ticket, memory.ptr(), slot, CHUNK),
                Direction::In => bed.queue.unpack(ticket, slot, memory.ptr(), CHUNK),
            }
            tickets.push(ticket);
        }
        let kept = random(3);
        let give_up = |ticket: u64| ticket % 3 != kept;
        std::thread::scope(|scope| {
            let quiesce = scope.spawn(|| bed.queue.quiesce(give_up));
            for _ in 0..random(200) {
                std::hint::spin_loop();
            }
            bed.gpu.hold_packs(false);
            bed.gpu.hold_unpacks(false);
            quiesce.join().unwrap().unwrap();
        });
        tickets.retain(|ticket| !give_up(*ticket));
        while !tickets.is_empty() {
            let done = bed.told.next();
            done.result.unwrap();
            // What was finished before it was given up may be told all the same, and late.
            if done.ticket >= first && !give_up(done.ticket) {
                let at = tickets.iter().position(|ticket| *ticket == done.ticket);
                tickets.swap_remove(at.expect("told once"));
            }
        }
        bed.queue.quiesce(|_| true).unwrap();
        bed.all_come_back();
    }
}
