//! The tests of devices over real providers that need no NIC.

mod common;

use common::offer;
use crossrail_fabric::examine::{Test, loaded_files};

fn examined(provider: &str) {
    let Some(offer) = offer(provider) else { return };
    for (name, test) in Test::ALL {
        let facts = test.run(&offer).unwrap_or_else(|error| panic!("{offer}, {name}: {error}"));
        eprintln!("{offer}, {name}: {facts:?}");
        if test == Test::Key {
            assert_eq!(facts["written"], 0.0, "{offer}: a wrong key has written");
        }
    }
    assert!(!loaded_files().is_empty());
}

#[test]
fn tcp() {
    examined("tcp");
}

#[test]
fn shared_memory() {
    examined("shm");
}
