//! In a process of its own: descriptors and threads are counted.

use std::time::{Duration, Instant};

use crossrail_control::{StoreServer, open};
use crossrail_types::Settings;

fn count(of: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count()
}

fn round(settings: &Settings) {
    let soon = || Instant::now() + Duration::from_secs(20);
    let server = StoreServer::start("127.0.0.1:0", settings).unwrap();
    let stores: Vec<_> = (0..20).map(|_| open(&server.address(), settings, soon()).unwrap()).collect();
    let leases: Vec<_> = stores.iter().map(|store| store.grant(Duration::from_secs(5), soon()).unwrap()).collect();
    let (_, now) = stores[0].list("", soon()).unwrap();
    let watches: Vec<_> = stores.iter().map(|store| store.watch("", now, soon()).unwrap()).collect();
    for (store, lease) in stores.iter().zip(&leases) {
        store.put("a", b"x", Some(lease.id()), soon()).unwrap();
        store.wait(&["never".to_owned()], Instant::now() + Duration::from_millis(1)).unwrap_err();
    }
    open(&server.address(), &with_secret(), soon()).unwrap_err();
    // Half of the clients outlive their server.
    drop((watches, leases));
    let mut stores = stores;
    stores.truncate(10);
    drop(server);
    open("tcp://127.0.0.1:1", settings, Instant::now() + Duration::from_millis(5)).unwrap_err();
}

fn with_secret() -> Settings {
    let mut settings = Settings::default();
    settings.set("secret", "another").unwrap();
    settings
}

#[test]
fn nothing_is_left() {
    let settings = Settings::default();
    round(&settings);
    let settled = |before: (usize, usize)| {
        let until = Instant::now() + Duration::from_secs(10);
        while (count("fd"), count("task")) != before {
            assert!(
                Instant::now() < until,
                "(descriptors, threads): {before:?}, now {:?}",
                (count("fd"), count("task"))
            );
            std::thread::yield_now();
        }
    };
    // The runner's own main thread and this one.
    let before = (count("fd"), 2);
    settled(before);
    for _ in 0..5 {
        round(&settings);
    }
    settled(before);
}
