//! Connecting where the system gives the calling thread no further thread: it dials itself.
#![allow(unsafe_code)]

use std::time::Duration;

use crossrail::{ConnectOptions, Context, Settings, Worker, WorkerOptions};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

/// Has the kernel refuse threads to the calling thread, as it does where memory or their number is limited.
fn deny_threads() {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let end = (libc::BPF_RET | libc::BPF_K) as u16;
    let row = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32;
    let mut rows = [
        row(load, 0, 0), // the number of the call
        row(equal, 2, libc::SYS_clone as u32),
        row(equal, 1, libc::SYS_clone3 as u32),
        row(end, 0, libc::SECCOMP_RET_ALLOW),
        row(end, 0, refuse),
    ];
    let program = libc::sock_fprog { len: rows.len() as u16, filter: rows.as_mut_ptr() };
    // SAFETY: the kernel copies the program during the call, and `rows` outlives it.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    std::thread::Builder::new().spawn(|| ()).expect_err("no thread is to be had");
}

#[test]
fn a_connect_without_threads_dials_on_the_calling_one() {
    let settings = [("CROSSRAIL_TLS", "tcp"), ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2")];
    let worker = || {
        let context = Context::new(Settings::from_pairs(settings).unwrap()).unwrap();
        Worker::new(&context, WorkerOptions::default()).unwrap()
    };
    let (a, b) = (worker(), worker());
    std::thread::scope(|scope| {
        let connected = scope.spawn(|| {
            deny_threads();
            a.connect(&b.address(), &ConnectOptions::default()).unwrap()
        });
        let to_b = connected.join().unwrap();
        let receive = b.recv(vec![0; 8 << 20], 1, u64::MAX, None).unwrap();
        let send = to_b.send(vec![7; 8 << 20], 1).unwrap();
        send.wait(LIMIT).unwrap();
        receive.wait(LIMIT).unwrap();
        assert!(receive.into_vec().unwrap().iter().all(|byte| *byte == 7));
    });
}
