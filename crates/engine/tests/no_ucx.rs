//! UCX is named but cannot be loaded. A test binary of its own, because a process loads UCX once.

use crossrail::{ConnectOptions, Context, ErrorKind, Settings, Worker, WorkerOptions};

fn context(tls: &str) -> Context {
    let settings = [("CROSSRAIL_TLS", tls), ("CROSSRAIL_UCX_LIBRARY", "/nowhere/libucp.so.0")];
    Context::new(Settings::from_pairs(settings).unwrap()).unwrap()
}

fn pair(tls: &str) -> (Worker, Worker) {
    let worker = || Worker::new(&context(tls), WorkerOptions::default()).unwrap();
    (worker(), worker())
}

#[test]
fn its_absence_is_one_line_with_the_fix_and_other_transports_go_on() {
    let row = context("ucx").info().unwrap().transports.into_iter().find(|row| row.name == "ucx").expect("a row");
    assert!(!row.usable);
    assert!(row.reason.is_some_and(|why| why.contains("CROSSRAIL_UCX_LIBRARY=/nowhere/libucp.so.0")));
    assert!(row.fix.is_some_and(|fix| fix.contains("apt install libucx0")));

    let (a, b) = pair("ucx");
    let error = a.connect(&b.address(), &ConnectOptions::default()).map(drop).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert!(error.detail.contains("CROSSRAIL_UCX_LIBRARY=/nowhere/libucp.so.0"), "{error}");
    assert!(!error.to_string().contains('\n'));

    let (a, b) = pair("ucx,tcp");
    let endpoint = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let explain = endpoint.explain();
    assert_eq!(explain.small, "tcp/lo");
    let row = explain.candidates.iter().find(|row| row.transport == "ucx").expect("a row");
    assert!(row.reason.as_deref().is_some_and(|why| why.contains("/nowhere")), "{explain}");
}
