//! libfabric is named but cannot be loaded. A test binary of its own, because a process loads it once.

use crossrail::{ConnectOptions, Context, ErrorKind, Settings, Worker, WorkerOptions};

fn context(tls: &str) -> Context {
    let settings = [("CROSSRAIL_TLS", tls), ("CROSSRAIL_FABRIC_LIBRARY", "/nowhere/libfabric.so.1")];
    Context::new(Settings::from_pairs(settings).unwrap()).unwrap()
}

fn pair(tls: &str) -> (Worker, Worker) {
    let worker = || Worker::new(&context(tls), WorkerOptions::default()).unwrap();
    (worker(), worker())
}

#[test]
fn its_absence_is_one_line_with_the_fix_and_other_transports_go_on() {
    let row = context("fabric").info().unwrap().transports.into_iter().find(|row| row.name == "fabric").expect("a row");
    assert!(!row.usable);
    assert!(row.reason.is_some_and(|why| why.contains("CROSSRAIL_FABRIC_LIBRARY=/nowhere/libfabric.so.1")));
    assert!(row.fix.is_some_and(|fix| fix.contains("apt install libfabric1")));

    let (a, b) = pair("fabric:efa");
    let error = a.connect(&b.address(), &ConnectOptions::default()).map(drop).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert!(error.detail.contains("CROSSRAIL_FABRIC_LIBRARY=/nowhere/libfabric.so.1"), "{error}");
    assert!(!error.to_string().contains('\n'));

    let (a, b) = pair("fabric,tcp");
    let endpoint = a.connect(&b.address(), &ConnectOptions::default()).unwrap();
    let explain = endpoint.explain();
    assert_eq!(explain.small, "tcp/lo");
    let row = explain.candidates.iter().find(|row| row.transport == "fabric").expect("a row");
    assert!(row.reason.as_deref().is_some_and(|why| why.contains("/nowhere")), "{explain}");
}
