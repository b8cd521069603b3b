//! The examples run, alone and as two processes.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Cargo builds a package's examples before it runs its tests, beside them.
fn example(name: &str) -> Command {
    let mut path: PathBuf = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    Command::new(path.join("examples").join(name))
}

#[test]
fn two_processes_alone() {
    let output = example("two_processes").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("hello from the other side (eager over shm)"), "{said}");
}

#[test]
fn two_processes_as_two() {
    let mut listener = example("two_processes").arg("listen").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(listener.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    let address = first.rsplit(' ').next().unwrap();
    let connector = example("two_processes").args(["connect", address]).status().unwrap();
    assert!(connector.success());
    assert!(lines.next().unwrap().unwrap().contains("hello"));
    assert!(listener.wait().unwrap().success());
}

#[test]
fn hotpath_runs_over_both_transports() {
    for transport in ["shm", "tcp"] {
        let output = example("hotpath").args(["100", transport]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.starts_with("100 round trips of 8 bytes over "), "{said}");
    }
}
