//! UCX's own variables leave no device. A process of its own each time, because UCX reads them when it is loaded.

mod common;

use std::process::Command;

use common::library;
use crossrail_ucx::Fabric;

#[test]
#[ignore = "the child of variables_that_hide_all_devices_are_named"]
fn role_opens() {
    let Some(library) = library() else { return };
    let tcp = ["tcp".to_owned()];
    for transports in [None, Some(&tcp[..])] {
        if let Err(error) = Fabric::open(library, transports, None) {
            println!("\nrefused: {error}");
        }
    }
}

#[test]
fn variables_that_hide_all_devices_are_named() {
    if library().is_none() {
        return;
    }
    for (name, value) in [("UCX_TLS", "self"), ("UCX_NET_DEVICES", "nowhere0")] {
        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["role_opens", "--exact", "--ignored", "--nocapture"])
            .env(name, value)
            .output()
            .expect("spawn");
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("refused: ")).collect();
        assert!(output.status.success() && !lines.is_empty(), "{name}: {output:?}");
        for line in lines {
            assert!(line.contains("UCX has no usable device"), "{line}");
            assert!(line.contains(&format!("unset what hides it: {name}={value}")), "{line}");
        }
    }
}
