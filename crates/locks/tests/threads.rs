//! Mutexes and conditions between threads, and in a forked child.
#![allow(unsafe_code)]

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, MutexGuard, PerProcess};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, alarm, fork, gettid};

const LONG: Duration = Duration::from_secs(60);
const TURNS: u32 = 2000;
const MANY: usize = 64;

/// Threads that all count under one lock, each in another way.
fn count() -> u32 {
    let count = Mutex::new(0);
    let add = |unlock: for<'a> fn(MutexGuard<'a, u32>)| {
        for _ in 0..TURNS {
            let mut count = count.lock();
            *count += 1;
            unlock(count);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| add(|count| drop(count)));
        scope.spawn(|| add(|count| MutexGuard::unlock_fair(count)));
        scope.spawn(|| {
            add(|mut count| {
                MutexGuard::bump(&mut count);
                drop(count);
            })
        });
        scope.spawn(|| {
            for _ in 0..TURNS {
                *count.try_lock_for(LONG).expect("nobody keeps it") += 1;
            }
        });
    });
    count.into_inner()
}

/// Threads that each wait for a lock of their own, which this one has, until `meanwhile` returns; how many then had it.
fn keep_waiting(threads: usize, meanwhile: impl FnOnce()) -> usize {
    let locks: Vec<_> = (0..threads).map(|_| Mutex::new(())).collect();
    thread::scope(|scope| {
        let (tell, told) = channel();
        let held: Vec<_> = locks.iter().map(Mutex::lock).collect();
        let wait = |lock| {
            let tell = tell.clone();
            scope.spawn(move || {
                tell.send(gettid()).expect("it is read");
                drop(Mutex::lock(lock));
            })
        };
        let waiting: Vec<_> = locks.iter().map(wait).collect();
        told.iter().take(threads).for_each(await_sleep);
        meanwhile();
        drop(held);
        waiting.into_iter().filter_map(|thread| thread.join().ok()).count()
    })
}

/// Returns when the thread of this process sleeps.
fn await_sleep(thread: Pid) {
    loop {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).expect("it runs");
        if stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S")) {
            return;
        }
        thread::yield_now();
    }
}

#[test]
fn one_thread_at_a_time_has_the_lock() {
    assert_eq!(count(), 4 * TURNS);
}

#[test]
fn a_wait_for_a_lock_ends_at_its_deadline() {
    let lock = Mutex::new(());
    let held = lock.lock();
    assert!(lock.try_lock().is_none() && lock.is_locked());
    assert!(lock.try_lock_for(Duration::from_millis(20)).is_none());
    assert!(lock.try_lock_until(Instant::now()).is_none());
    drop(held);
    assert!(lock.try_lock_until(Instant::now()).is_some());
}

#[test]
fn a_bump_lets_a_waiting_thread_go_first() {
    let (turn, waits) = (Mutex::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let mut held = turn.lock();
        let waiter = scope.spawn(|| {
            waits.store(true, Ordering::Release);
            *turn.lock() += 1;
        });
        // It goes on to wait for the lock; a bump before that hands it to nobody.
        let began = Instant::now();
        while *held == 0 && began.elapsed() < LONG {
            if waits.load(Ordering::Acquire) {
                MutexGuard::bump(&mut held);
            }
            thread::yield_now();
        }
        assert_eq!(*held, 1);
        drop(held);
        waiter.join().expect("it is fine");
    });
}

#[test]
fn a_thread_that_locks_again_and_again_keeps_nobody_out() {
    let (lock, stop) = (Mutex::new(()), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let held = lock.lock();
                (0..100).for_each(|_| std::hint::spin_loop());
                drop(held);
            }
        });
        for _ in 0..100 {
            drop(lock.try_lock_for(LONG).expect("it gets its turn"));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn whoever_waits_is_notified() {
    let (number, changed) = (Mutex::new(0), Condvar::new());
    thread::scope(|scope| {
        let waiters: Vec<_> = (0..3)
            .map(|me| {
                let (number, changed) = (&number, &changed);
                scope.spawn(move || {
                    let mut held = number.lock();
                    for turn in 0..100 {
                        while *held < turn {
                            if me == 0 {
                                changed.wait(&mut held);
                            } else {
                                assert!(!changed.wait_for(&mut held, LONG).timed_out());
                            }
                        }
                    }
                })
            })
            .collect();
        for _ in 0..100 {
            *number.lock() += 1;
            changed.notify_all();
        }
        waiters.into_iter().for_each(|waiter| waiter.join().expect("it was notified"));
    });
    let mut held = number.lock();
    changed.notify_one();
    assert!(changed.wait_until(&mut held, Instant::now() + Duration::from_millis(5)).timed_out());
}

/// A thread of the parent has a static's lock when it is forked, in the middle of a change.
#[test]
fn a_forked_child_has_statics_of_its_own() {
    static SHARED: PerProcess<Mutex<Vec<u8>>> = PerProcess::new();
    let mut held = SHARED.lock();
    held.push(1);
    // SAFETY: as below.
    match unsafe { fork() }.expect("it forks") {
        ForkResult::Child => {
            alarm::set(60);
            let right = catch_unwind(|| {
                thread::scope(|scope| (0..8).for_each(|number| drop(scope.spawn(move || SHARED.lock().push(number)))));
                SHARED.lock().len() == 8
            });
            // SAFETY: always.
            unsafe { libc::_exit(if right.unwrap_or(false) { 0 } else { 1 }) }
        }
        ForkResult::Parent { child } => assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0))),
    }
    drop(held);
    assert_eq!(*SHARED.lock(), [1]);
}

/// Locks of a child must have nothing to do with threads of its parent that waited for a lock when it was forked.
#[test]
fn a_forked_child_uses_locks_of_its_own() {
    let had = keep_waiting(MANY, || {
        // SAFETY: the child allocates and starts threads, which the C library lets a forked child do, and ends without
        // running anything of its parent's.
        match unsafe { fork() }.expect("it forks") {
            ForkResult::Child => {
                // A child that hangs is ended. The C library unmaps stacks, those of the parent's threads among them,
                // when several threads have ended.
                alarm::set(60);
                let right = catch_unwind(|| (0..32).all(|_| keep_waiting(MANY, || ()) == MANY) && count() == 4 * TURNS);
                // SAFETY: always.
                unsafe { libc::_exit(if right.unwrap_or(false) { 0 } else { 1 }) }
            }
            ForkResult::Parent { child } => assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0))),
        }
    });
    assert_eq!(had, MANY);
}
