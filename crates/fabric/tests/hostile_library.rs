//! The hostile libfabric itself: it has libfabric's layout, a correct client runs over it as over real providers, and it
//! names every promise that a client breaks.

mod stand_in;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crossrail_transport::conformance::skip;
use stand_in::{compile, library, place};

fn client() -> Option<PathBuf> {
    let path = place(&format!("client-{:?}", std::thread::current().id()).replace(['(', ')'], ""));
    compile(&["-o", path.to_str().expect("text"), "client.c", "-ldl", "-lpthread"]).then_some(path)
}

fn run(client: &Path, library: &Path, arguments: &[&str]) -> Output {
    // The handlers of the library are left to the tests of the crate: this client restores none.
    let mut command = Command::new(client);
    command.arg(library).args(arguments).env("HOSTILE_NO_HANDLERS", "1").output().expect("spawn")
}

#[test]
fn its_layout_is_that_of_the_installed_headers() {
    let header = Path::new("/usr/include/rdma/fi_rma.h");
    if !header.exists() {
        return skip("there are no headers of libfabric (libfabric-dev)");
    }
    let (ours, theirs) = (place("layout-ours"), place("layout-theirs"));
    // The headers need GNU's C.
    let installed = ["-std=gnu11", "-DINSTALLED", "-o", theirs.to_str().expect("text"), "hostile/layout.c"];
    if !compile(&["-o", ours.to_str().expect("text"), "hostile/layout.c"]) || !compile(&installed) {
        return;
    }
    let text = |program: &Path| {
        let output = Command::new(program).output().expect("spawn");
        String::from_utf8(output.stdout).expect("text")
    };
    let (ours, theirs) = (text(&ours), text(&theirs));
    assert!(ours.lines().count() > 200, "{ours}");
    for (ours, theirs) in ours.lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
}

#[test]
fn a_correct_client_runs_over_every_provider_of_it() {
    let (Some(client), Some(library)) = (client(), library()) else { return };
    for provider in ["hostile", "tcp", "shm", "efa", "efa-direct", "cxi", "verbs;ofi_rxm"] {
        for seed in 1..=4 {
            let output = run(&client, library, &[provider, &seed.to_string(), "200"]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{provider}, seed {seed}: {text}");
        }
    }
}

/// Shows that the client relies on nothing that real providers do not do.
#[test]
fn a_correct_client_runs_over_real_providers() {
    let Some(client) = client() else { return };
    let real = std::env::var_os("CROSSRAIL_FABRIC_LIBRARY").map_or(PathBuf::from("libfabric.so.1"), PathBuf::from);
    let real = if real.is_dir() { real.join("libfabric.so.1") } else { real };
    for provider in ["tcp", "shm"] {
        let output = run(&client, &real, &[provider, "1", "500"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains("dlopen") || text.contains("No data available") {
            skip(&format!("libfabric has no provider {provider} here: {text}"));
        } else {
            assert!(output.status.success(), "{provider}: {text}");
        }
    }
}

#[test]
fn it_names_every_promise_that_is_broken() {
    let (Some(client), Some(library)) = (client(), library()) else { return };
    for (misuse, provider, options, named) in [
        ("too-long", "hostile", "msg=16384", "LIMIT: a write of 16385 bytes"),
        ("too-many", "hostile", "iov=1", "LIMIT: 9 pieces"),
        ("wide", "hostile", "data=4", "LIMIT: immediate 200000000"),
        ("nowhere", "hostile", "", "LIMIT: a write to nowhere"),
        ("unequal", "hostile", "", "LIMIT: a write of 64 bytes to 65"),
        ("inject-long", "hostile", "inject=8", "LIMIT: an injected write of 9 bytes"),
        ("no-desc", "efa", "", "NOT_REGISTERED"),
        ("foreign-source", "efa", "", "NOT_REGISTERED"),
        ("stranger", "hostile", "", "NO_SUCH_ADDRESS"),
        ("source-closed", "efa", "early=0,eagain=0,move=20", "SOURCE_CLOSED"),
        ("source-changed", "hostile", "early=0,eagain=0,move=20", "SOURCE_CHANGED"),
        ("context-twice", "efa-direct", "early=0,eagain=0,move=1", "CONTEXT: an operation with the context of one"),
        ("context-changed", "efa-direct", "early=0,eagain=0,move=1", "CONTEXT: the context of an operation changed"),
        ("loops", "hostile", "tx=4", "LOOPS"),
        ("threads", "hostile", "", "CONCURRENT"),
        ("beyond", "hostile", "", "NOT_OFFERED"),
        ("late-option", "hostile", "", "BOUND_LATE"),
        ("queue-first", "hostile", "", "CLOSED_BUSY"),
        ("no-close", "hostile", "", "CLOSED_BUSY"),
        ("close-twice", "hostile", "", "USED_AFTER_CLOSE"),
        ("late-poll", "hostile", "", "READ_WITHOUT_ENDPOINT"),
        ("no-free", "hostile", "", "LEAKED: 2 fi_info"),
        ("small-queue", "hostile", "move=255", "CQ_OVERRUN"),
        ("unbound", "cxi", "", "NOT_BOUND"),
        ("no-readerr", "hostile", "fail_at=9", "ERROR_NOT_READ"),
        ("no-event-queue", "hostile", "fail_at=9,null=256", "abort: an error, and no event queue is bound"),
        ("not-introduced", "efa-direct", "", "NOT_INTRODUCED"),
    ] {
        let output = run(&client, library, &[provider, "7", "500", options, misuse]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && text.contains(named), "{misuse}: not {named}, but {text}");
    }
}
