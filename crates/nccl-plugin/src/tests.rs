//! The tables, called as NCCL calls them: by the driver of foreign plugins, and one function at a time.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_nccl_abi::{HANDLE_LEN, INVALID_ARGUMENT, NetV12, PTR_CUDA, PTR_HOST, REMOTE_ERROR, SUCCESS};
use crossrail_nccl_driver::{Lanes, Memory, Network, Plugin, Receiver, Sender};

pub(crate) mod rails;

use crate::net::{Net, Process};
use crate::{TABLE_V8, TABLE_V9, TABLE_V10, TABLE_V11, TABLE_V12};

const LIMIT: Duration = Duration::from_secs(20);

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "{what} takes too long");
        std::thread::yield_now();
    }
}

fn plugin(version: u32) -> Plugin {
    let table: *const c_void = match version {
        8 => ptr::from_ref(&TABLE_V8.0).cast(),
        9 => ptr::from_ref(&TABLE_V9.0).cast(),
        10 => ptr::from_ref(&TABLE_V10.0).cast(),
        11 => ptr::from_ref(&TABLE_V11.0).cast(),
        _ => ptr::from_ref(&TABLE_V12.0).cast(),
    };
    // SAFETY: the table of that version.
    unsafe { Plugin::of_table(version, table) }.expect("a plugin")
}

fn transfer(sending: &Network<'_>, receiving: &Network<'_>) {
    const SIZE: usize = (1 << 20) + 123;
    let lanes = Lanes { devices: vec![0], channels: 3, window: 16, chunk: 64 << 10 };
    let memory = || Memory::new(SIZE).expect("memory");
    let mut receiver = Receiver::new(receiving, lanes.clone(), memory()).expect("a receiver");
    let mut sender = Sender::new(sending, lanes, memory(), &receiver.handles()).expect("a sender");
    until("connecting", || {
        let connected = sender.connect().expect("connect");
        receiver.accept().expect("accept") && connected
    });
    for round in 1..3 {
        let sent = sender.bytes().expect("nothing in flight");
        sent.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((at * round) >> 3) as u8);
        let sent = sent.to_vec();
        receiver.begin();
        let (mut announced, mut delivered, mut received) = (Vec::new(), 0, 0);
        until("the transfer", || {
            received += receiver.step(&mut announced).expect("receive").0;
            announced.drain(..).for_each(|chunk| sender.assign(chunk).expect("a chunk"));
            delivered += sender.step().expect("send").0;
            received == receiver.chunks() && delivered == sender.chunks()
        });
        assert!(receiver.bytes().expect("nothing in flight") == sent, "round {round} of the data differs");
        let report = receiver.take_report();
        assert_eq!((report.lanes[0].bytes, report.lanes[0].chunks), (SIZE as u64, 17));
    }
    sender.close().expect("close");
    receiver.close().expect("close");
}

#[test]
fn every_table_moves_data() {
    for version in 8..=12 {
        let plugin = plugin(version);
        let (one, other) = (plugin.init().expect("init"), plugin.init().expect("init"));
        assert_eq!((plugin.name(), one.devices().expect("devices")), ("Crossrail", 1));
        let properties = one.properties(0).expect("properties");
        assert!(properties.name.starts_with("crossrail:"), "{}", properties.name);
        assert_eq!((properties.ptr_support, properties.max_recvs, properties.offload), (PTR_HOST, 8, (0, 0)));
        assert!(properties.speed_mbps > 0 && properties.latency_us > 0.0);
        assert!(one.properties(1).is_err(), "there is one device");
        transfer(&one, &other);
    }
}

/// The newest table, with two contexts and a connection between them.
struct Pair {
    table: &'static NetV12,
    contexts: [*mut c_void; 2],
    send: *mut c_void,
    recv: *mut c_void,
}

macro_rules! call {
    ($table:expr, $function:ident, $($argument:expr),*) => {
        // SAFETY: the arguments are as NCCL would pass them.
        unsafe { $table.$function.expect("a function")($($argument),*) }
    };
}

impl Pair {
    fn new() -> Pair {
        let table = &TABLE_V12.0;
        let mut contexts = [ptr::null_mut(); 2];
        for context in &mut contexts {
            assert_eq!(call!(table, init, context, 1, ptr::null_mut(), None, None), SUCCESS);
        }
        Pair::connected(contexts)
    }

    /// Networks with so many workers each. `hands_over`: those start transfers.
    fn of_workers(counts: [usize; 2], hands_over: bool) -> Pair {
        let process = Process::get().expect("settings");
        Pair::of_nets(counts.map(|count| Net::of(process, count, hands_over).expect("a network")))
    }

    fn of_nets(nets: [Arc<Net>; 2]) -> Pair {
        Pair::connected(nets.map(|net| Arc::into_raw(net).cast_mut().cast()))
    }

    fn connected(contexts: [*mut c_void; 2]) -> Pair {
        let table = &TABLE_V12.0;
        let (mut handle, mut listener) = ([0_u8; HANDLE_LEN], ptr::null_mut());
        let at: *mut c_void = handle.as_mut_ptr().cast();
        assert_eq!(call!(table, listen, contexts[1], 0, at, &mut listener), SUCCESS);
        let (mut send, mut recv): (*mut c_void, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
        until("connecting", || {
            if send.is_null() {
                assert_eq!(call!(table, connect, contexts[0], 0, at, &mut send, ptr::null_mut()), SUCCESS);
            }
            if recv.is_null() {
                assert_eq!(call!(table, accept, listener, &mut recv, ptr::null_mut()), SUCCESS);
            }
            !send.is_null() && !recv.is_null()
        });
        assert_eq!(call!(table, close_listen, listener), SUCCESS);
        Pair { table, contexts, send, recv }
    }

    fn send(&self, bytes: &mut [u8], tag: c_int) -> *mut c_void {
        let (mut request, data) = (ptr::null_mut(), bytes.as_mut_ptr().cast());
        let none = ptr::null_mut();
        assert_eq!(call!(self.table, isend, self.send, data, bytes.len(), tag, none, none, &mut request), SUCCESS);
        request
    }

    fn receive(&self, buffers: &mut [&mut [u8]], tags: &mut [c_int]) -> *mut c_void {
        let mut data: Vec<*mut c_void> = buffers.iter_mut().map(|buffer| buffer.as_mut_ptr().cast()).collect();
        let mut sizes: Vec<usize> = buffers.iter().map(|buffer| buffer.len()).collect();
        let (mut request, count) = (ptr::null_mut(), data.len() as c_int);
        let (data, sizes, tags) = (data.as_mut_ptr(), sizes.as_mut_ptr(), tags.as_mut_ptr());
        let none = ptr::null_mut();
        let status = call!(self.table, irecv, self.recv, count, data, sizes, tags, none, none, &mut request);
        assert_eq!(status, SUCCESS);
        request
    }

    fn test(&self, request: *mut c_void, sizes: &mut [c_int; 8]) -> (c_int, bool) {
        let mut done = 0;
        let status = call!(self.table, test, request, &mut done, sizes.as_mut_ptr());
        (status, done != 0)
    }

    fn finish(&self, request: *mut c_void) -> [c_int; 8] {
        let mut sizes = [0; 8];
        until("a request", || {
            let (status, done) = self.test(request, &mut sizes);
            assert_eq!(status, SUCCESS);
            done
        });
        sizes
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        call!(self.table, close_send, self.send);
        call!(self.table, close_recv, self.recv);
        for context in self.contexts {
            call!(self.table, finalize, context);
        }
    }
}

#[test]
fn receives_match_by_tag_and_may_be_larger_than_the_message() {
    let pair = Pair::new();
    let (mut first, mut second) = ([0; 100], [0; 5000]);
    let request = pair.receive(&mut [&mut first, &mut second], &mut [7, -1]);
    let (mut short, mut long) = ([3; 60], [4; 5000]);
    let sends = [pair.send(&mut long, -1), pair.send(&mut short, 7)];
    assert_eq!(pair.finish(request)[..2], [60, 5000]);
    sends.iter().for_each(|send| assert!(pair.finish(*send)[0] > 0));
    assert!(first[..60] == [3; 60] && first[60..] == [0; 40] && second == [4; 5000]);
}

#[test]
fn far_more_requests_than_nccl_posts_are_in_flight_at_once() {
    let pair = Pair::new();
    let mut sent: Vec<[u8; 4096]> = (0..100).map(|at| [at; 4096]).collect();
    let sends: Vec<*mut c_void> = sent.iter_mut().map(|bytes| pair.send(bytes, 0)).collect();
    let mut received = vec![[0; 4096]; 100];
    let receives: Vec<*mut c_void> = received.iter_mut().map(|bytes| pair.receive(&mut [bytes], &mut [0])).collect();
    assert!(receives.iter().all(|request| pair.finish(*request)[0] == 4096));
    assert!(sends.iter().all(|request| pair.finish(*request)[0] == 4096));
    assert!(received == sent, "messages of one tag match in order");
}

#[test]
fn messages_that_take_turns_between_workers_match_in_the_order_of_their_tags() {
    for (counts, hands_over) in [([3, 3], true), ([4, 2], false), ([1, 3], true)] {
        let pair = Pair::of_workers(counts, hands_over);
        // Each tag in order, but the tags in another order at either end, and lengths beyond what goes with a first frame.
        let len = |at: usize| if at.is_multiple_of(4) { 200_000 } else { 100 };
        let mut received: Vec<Vec<u8>> = (0..24).map(|_| vec![0; 200_000]).collect();
        let (one, other) = received.split_at_mut(12);
        let receives: Vec<*mut c_void> =
            one.iter_mut().zip(other).map(|(one, other)| pair.receive(&mut [one, other], &mut [5, -3])).collect();
        let mut sent: Vec<Vec<u8>> = (0..24).map(|at| vec![at as u8 + 1; len(at)]).collect();
        let (one, other) = sent.split_at_mut(12);
        let mut sends: Vec<*mut c_void> = other.iter_mut().map(|bytes| pair.send(bytes, -3)).collect();
        sends.extend(one.iter_mut().map(|bytes| pair.send(bytes, 5)));
        for (at, request) in receives.into_iter().enumerate() {
            assert_eq!(pair.finish(request)[..2], [len(at) as c_int, len(at + 12) as c_int], "{counts:?}, {at}");
        }
        sends.into_iter().for_each(|request| assert!(pair.finish(request)[0] > 0));
        for (at, (received, sent)) in received.iter().zip(&sent).enumerate() {
            assert!(received[..len(at)] == sent[..], "{counts:?}, message {at}");
        }
    }
}

#[test]
fn a_network_of_several_workers_reaches_itself() {
    let mut pair = Pair::of_workers([2, 1], true);
    let own = pair.contexts[0];
    let (mut handle, mut listener) = ([0_u8; HANDLE_LEN], ptr::null_mut());
    let at: *mut c_void = handle.as_mut_ptr().cast();
    assert_eq!(call!(pair.table, listen, own, 0, at, &mut listener), SUCCESS);
    let (mut send, mut recv): (*mut c_void, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
    until("connecting", || {
        if send.is_null() {
            assert_eq!(call!(pair.table, connect, own, 0, at, &mut send, ptr::null_mut()), SUCCESS);
        }
        if recv.is_null() {
            assert_eq!(call!(pair.table, accept, listener, &mut recv, ptr::null_mut()), SUCCESS);
        }
        !send.is_null() && !recv.is_null()
    });
    assert_eq!(call!(pair.table, close_listen, listener), SUCCESS);
    std::mem::swap(&mut pair.send, &mut send);
    std::mem::swap(&mut pair.recv, &mut recv);
    for round in 1..4 {
        let (mut buffer, mut bytes) = ([0; 300], [round; 300]);
        let receive = pair.receive(&mut [&mut buffer], &mut [0]);
        let sent = pair.send(&mut bytes, 0);
        assert_eq!(pair.finish(receive)[0], 300);
        assert_eq!(pair.finish(sent)[0], 300);
        assert!(buffer == [round; 300]);
    }
    call!(pair.table, close_send, send);
    call!(pair.table, close_recv, recv);
}

#[test]
fn memory_is_left_alone_once_the_communicator_is_closed() {
    for hands_over in [false, true] {
        let mut pair = Pair::of_workers([2, 2], hands_over);
        let mut buffers = vec![vec![0_u8; 200_000]; 8];
        for buffer in &mut buffers {
            pair.receive(&mut [buffer], &mut [0]);
        }
        // Some of them have not been started yet.
        assert_eq!(call!(pair.table, close_recv, pair.recv), SUCCESS);
        pair.recv = ptr::null_mut();
        let mut bytes = vec![7; 100_000];
        for _ in 0..8 {
            pair.send(&mut bytes, 0);
        }
        drop(pair);
        assert!(buffers.iter().flatten().all(|byte| *byte == 0), "hands over: {hands_over}");
    }
}

#[test]
fn a_peer_that_has_left_is_an_error() {
    let mut pair = Pair::new();
    let mut buffer = [0; 64];
    let request = pair.receive(&mut [&mut buffer], &mut [0]);
    let left = std::mem::replace(&mut pair.contexts[0], ptr::null_mut());
    assert_eq!(call!(pair.table, finalize, left), SUCCESS);
    let mut status = SUCCESS;
    until("the error", || {
        let (now, done) = pair.test(request, &mut [0; 8]);
        assert!(!done, "nothing was sent");
        status = now;
        status != SUCCESS
    });
    assert_eq!(status, REMOTE_ERROR);
}

#[test]
fn invalid_arguments_are_errors() {
    let pair = Pair::new();
    let none = ptr::null_mut();
    let mut request = ptr::null_mut();
    let mut buffer = [0_u8; 8];
    let data: *mut c_void = buffer.as_mut_ptr().cast();
    assert_eq!(call!(pair.table, isend, none, data, 8, 0, none, none, &mut request), INVALID_ARGUMENT);
    assert_eq!(call!(pair.table, test, none, &mut 0, ptr::null_mut()), INVALID_ARGUMENT);
    assert_eq!(call!(pair.table, reg_mr, pair.send, data, 8, PTR_CUDA, &mut request), INVALID_ARGUMENT);
    assert_eq!(call!(pair.table, isend, pair.send, none, 8, 0, none, none, &mut request), INVALID_ARGUMENT);
    let (mut nowhere, mut size, mut tag) = (none, 8, 0);
    let status = call!(
        pair.table,
        irecv,
        pair.recv,
        1,
        &mut nowhere,
        &mut size,
        &mut tag,
        ptr::null_mut(),
        ptr::null_mut(),
        &mut request
    );
    assert_eq!(status, INVALID_ARGUMENT, "nowhere to receive to");
    let (mut data, mut sizes, mut tags) = ([data; 9], [8; 9], [0; 9]);
    let (data, sizes, tags) = (data.as_mut_ptr(), sizes.as_mut_ptr(), tags.as_mut_ptr());
    for count in [0, 9, -1] {
        let profiles = ptr::null_mut();
        let status =
            call!(pair.table, irecv, pair.recv, count, data, sizes, tags, profiles, ptr::null_mut(), &mut request);
        assert_eq!(status, INVALID_ARGUMENT, "{count} receives");
    }
    let mut handle = [1_u8; HANDLE_LEN];
    let handle: *mut c_void = handle.as_mut_ptr().cast();
    let mut comm = ptr::null_mut();
    assert_eq!(call!(pair.table, connect, pair.contexts[0], 0, handle, &mut comm, ptr::null_mut()), INVALID_ARGUMENT);
    assert_eq!(call!(pair.table, finalize, none), SUCCESS);
}
