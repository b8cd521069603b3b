//! Signals, and what they promise: over rails that delay, reorder and repeat, and that are lost.

use std::net::Ipv4Addr;
use std::sync::atomic::AtomicBool;

use crossrail::placing::Placing;
use crossrail_transport::placing::dry::{self, Saw};

use super::*;
use crate::tests::rails::connections_at;

/// Two ranks over emulated NICs, which a seed makes reorder: the data of each rank has rails of its own.
fn world(seed: u64) -> (World, [Saw; 2]) {
    let (out0, into1, first) = dry::pair(3, seed);
    let (out1, into0, second) = dry::pair(3, seed ^ 0x5555);
    let boxed = |end| Box::new(end) as Box<dyn Placing>;
    (World::of_wires([[boxed(out0), boxed(into1)], [boxed(out1), boxed(into0)]]), [first, second])
}

#[test]
fn a_signal_is_behind_all_puts_before_it_whatever_the_rails_do() {
    const PUTS: u64 = 600;
    const LEN: u64 = 4000;
    for (seed, of_gpu, loses) in [(1, false, None), (2, true, None), (3, false, Some(1)), (4, true, Some(0))] {
        let (world, saws) = world(seed);
        let plan = Arc::new(Plan::default());
        plan.polls.store(7, Ordering::Relaxed);
        let memory = || if of_gpu { Memory::gpu(1 << 20, &plan) } else { Memory::host(1 << 20) };
        let source = world.register(0, || Memory::host((8 * PUTS + LEN) as usize));
        let window = world.register(0, memory);
        let signals = world.register(SIGNALS, memory);
        let (sender, ended) = (&world.0[0], AtomicBool::new(false));
        // Each put's words contain its number.
        (0..PUTS + LEN / 8).for_each(|at| source.memory[0].word(8 * at as usize).store(at, Ordering::Relaxed));
        std::thread::scope(|scope| {
            let seen = scope.spawn(|| {
                // As a kernel: once the signal counts `n` puts, all of them are there, in whichever context they were.
                let mut checked = 0;
                until("all signals", || {
                    let count = signals.memory[1].load(8);
                    for number in checked..count {
                        let at = (number % 200 * LEN) as usize;
                        for word in (0..LEN as usize).step_by(8).step_by(61) {
                            let found = window.memory[1].load(at + word);
                            assert!(
                                found >= number + word as u64 / 8,
                                "word {word} of put {number} of {count}: {found}"
                            );
                        }
                    }
                    checked = count;
                    count == PUTS
                });
                ended.store(true, Ordering::Release);
            });
            let mut requests = Vec::new();
            for number in 0..PUTS {
                if number == PUTS / 2
                    && let Some(rail) = loses
                {
                    saws[0].lose(rail);
                }
                let route = sender.to((number % 3) as i32, 1);
                let (from, to) = ((8 * number, source.handles[0]), (number % 200 * LEN, window.handles[0]));
                requests.push(sender.rma.put(route, from, LEN as usize, to).expect("a put"));
                // The signal is in yet another context, and has no bytes.
                let none = (0, RmaObject::NULL);
                let done = signal((8, signals.handles[0]), SIGNAL_INC, 0);
                requests.push(sender.rma.put_signal(sender.to(3, 1), none, 0, none, done).expect("a signal"));
                while requests.len() > 100 {
                    sender.finish(requests.remove(0));
                }
            }
            requests.into_iter().for_each(|request| sender.finish(request));
            seen.join().expect("no put is late");
        });
        assert!(ended.load(Ordering::Acquire));
    }
}

#[test]
fn signals_become_visible_in_their_order() {
    const ROUNDS: u64 = 300;
    let (world, _saws) = world(9);
    let plan = Arc::new(Plan::default());
    let signals = world.register(SIGNALS, || Memory::gpu(4096, &plan));
    let sender = &world.0[0];
    std::thread::scope(|scope| {
        let seen = scope.spawn(|| {
            until("all signals", || {
                // Backwards: a word is never ahead of those that are signalled before it.
                let later = signals.memory[1].load(64);
                let earlier = signals.memory[1].load(0);
                assert!(earlier >= later, "{earlier} and {later}");
                later == ROUNDS
            });
        });
        let mut requests = Vec::new();
        for _ in 0..ROUNDS {
            for at in [0, 64] {
                let none = (0, RmaObject::NULL);
                let done = signal((at, signals.handles[0]), SIGNAL_INC, 0);
                requests.push(sender.rma.put_signal(sender.to(0, 1), none, 0, none, done).expect("a signal"));
            }
            while requests.len() > 60 {
                sender.finish(requests.remove(0));
            }
        }
        requests.into_iter().for_each(|request| sender.finish(request));
        seen.join().expect("in order");
    });
}

#[test]
fn words_never_tear() {
    const ROUNDS: u64 = 400;
    let world = World::new(14, 2);
    let source = world.register(0, || Memory::host(8192));
    let window = world.register(0, || Memory::host(8192));
    let sender = &world.0[0];
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let seen = scope.spawn(|| {
            until("the end", || {
                for at in (0..8192).step_by(8) {
                    let word = window.memory[1].load(at);
                    assert!(word == word.rotate_left(8), "{word:#x} at {at}");
                }
                ended.load(Ordering::Acquire)
            });
        });
        for round in 0..ROUNDS {
            // Odd lengths, which end inside a word: of that one only bytes are written, all alike.
            source.memory[0].bytes().fill(round as u8);
            let len = 8000 + (round % 24) as usize * 8;
            let (from, to) = ((0, source.handles[0]), (0, window.handles[0]));
            let put = sender.rma.put(sender.to(0, 1), from, len, to).expect("a put");
            sender.finish(put);
        }
        ended.store(true, Ordering::Release);
        seen.join().expect("whole words");
    });
}

#[test]
fn long_puts_cut_at_words_and_values_are_stored_at_once() {
    // A put of more than a batch, to an odd address.
    let (world, _saws) = world(11);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(2 << 20, &plan));
    let sender = &world.0[0];
    let mine = window.handles[0];
    window.memory[0].bytes().iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at, 7));
    let put = sender.rma.put(sender.to(0, 1), (3, mine), 700_000, (1_000_005, mine)).expect("a put");
    sender.finish(put);
    assert!(window.memory[1].bytes()[1_000_005..1_700_005] == window.memory[0].bytes()[3..700_003]);
    // An inline value, as NCCL sends it from host memory.
    let values = world.register(0, || Memory::host(64));
    values.memory[0].word(8).store(0x0102_0304_0506_0708, Ordering::Relaxed);
    let put = sender.rma.put(sender.to(0, 1), (8, values.handles[0]), 8, (64, mine)).expect("a put");
    values.memory[0].word(8).store(0, Ordering::Relaxed);
    sender.finish(put);
    assert_eq!(window.memory[1].load(64), 0x0102_0304_0506_0708, "the value is taken when the put is enqueued");
}

#[test]
fn a_rail_that_is_lost_with_puts_in_flight_neither_loses_nor_doubles_any() {
    const PUTS: u64 = 400;
    const LEN: usize = 40_000;
    let rails = [1, 2, 3, 4].map(|rail| Ipv4Addr::new(127, 0, 46, rail));
    let names = rails.map(|rail| rail.to_string()).join(",");
    let settings = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", names.as_str())];
    let settings = crossrail::Settings::from_pairs(settings).expect("settings");
    let process = Box::leak(Box::new(Process::of(settings, |_| false).expect("the rails")));
    let world = World::over(process, 14, 2);
    let plan = Arc::new(Plan::default());
    let window = world.register(0, || Memory::gpu(PUTS as usize * LEN, &plan));
    let signals = world.register(SIGNALS, || Memory::gpu(4096, &plan));
    let (sender, mine) = (&world.0[0], window.handles[0]);
    window.memory[0].bytes().iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at, 5));
    let mut requests = std::collections::VecDeque::new();
    let mut lost = 0;
    for number in 0..PUTS {
        if number == PUTS / 2 {
            for fd in connections_at(rails[2]) {
                // The other end may have ended it already.
                lost += usize::from(nix::sys::socket::shutdown(fd, nix::sys::socket::Shutdown::Both).is_ok());
            }
        }
        let (at, done) = (number * LEN as u64, signal((8, signals.handles[0]), SIGNAL_ADD, number + 1));
        let route = sender.to((number % 4) as i32, 1);
        requests.push_back(sender.rma.put_signal(route, (at, mine), LEN, (at, mine), done).expect("a put"));
        if requests.len() > 100 {
            sender.finish(requests.pop_front().expect("one"));
        }
    }
    requests.into_iter().for_each(|request| sender.finish(request));
    assert!(lost > 0, "no connection was there to be lost");
    assert_eq!(signals.memory[1].load(8), PUTS * (PUTS + 1) / 2);
    assert!(window.memory[1].bytes()[..PUTS as usize * LEN] == window.memory[0].bytes()[..PUTS as usize * LEN]);
    assert_eq!(sender.rma.has_error(sender.contexts), Ok(false));
}
