//! Libraries that are not the UCX that this crate knows, and two UCX in one process. Each is loaded by a process of its
//! own, because a process loads UCX once; they are built here with the C compiler.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{library, pair};
use crossrail_transport::conformance::skip;
use crossrail_ucx::{Fabric, loaded_files};

/// A library that the child loads before UCX, as another part of its program would.
const OTHER: &str = "CROSSRAIL_TEST_OTHER_UCX";

/// A UCX that says its version and what it is set to, and opens no context.
const STUB: &str = r#"
#include <stdio.h>
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *patch) { *major = MAJOR; *minor = MINOR; *patch = 1; }
#define TEXT(x) #x
#define VERSION(major, minor) TEXT(major) "." TEXT(minor) ".1"
const char *ucp_get_version_string(void) { return VERSION(MAJOR, MINOR); }
const char *ucs_status_string(signed char status) { return "a stub opens nothing"; }
int ucp_config_read(void *prefix, void *file, void **config) { *config = config; return 0; }
int ucp_config_modify(void *config, const char *name, const char *value) {
    printf("\nset: %s=%s\n", name, value);
    return fflush(stdout);
}
int ucp_init_version(void) { return -6; }
"#;

/// The folder of a compiled [`STUB`] of version `major.minor.1`, which has all functions of the table but `without`.
fn stub(major: u32, minor: u32, without: &str) -> Option<PathBuf> {
    let (_, table) = include_str!("../src/raw.rs").split_once("\ntable! {\n").expect("the table");
    let (table, _) = table.split_once("\n}\n").expect("its end");
    let names = table.lines().filter_map(|line| line.trim().split_once(": fn(")).map(|(name, _)| name);
    let others = names.filter(|name| *name != without && !STUB.contains(&format!("{name}(")));
    let code: String = std::iter::once(STUB.to_owned())
        .chain(others.map(|name| format!("int {name}(void) {{ return 0; }}\n")))
        .collect();
    // The tests of this program run at the same time.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("ucx-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let source = folder.join("stub.c");
    std::fs::write(&source, code).expect("a file");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", &format!("-DMAJOR={major}"), &format!("-DMINOR={minor}"), "-o"]);
    match compiler.arg(folder.join("libucp.so.0")).arg(&source).output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            skip(&format!("there is no C compiler: {error}"));
            return None;
        }
    }
    Some(folder)
}

/// What a child prints that loads the library in `place` (that of this test without one) and opens it.
fn child(place: Option<&Path>, other: Option<&Path>, setting: Option<(&str, &str)>) -> String {
    let mut child = Command::new(std::env::current_exe().expect("this test"));
    child.args(["role_loads", "--exact", "--ignored", "--nocapture"]).env_remove("UCX_PROTO_ENABLE").envs(setting);
    child.envs(place.map(|place| ("CROSSRAIL_UCX_LIBRARY", place))).envs(other.map(|other| (OTHER, other)));
    let output = child.output().expect("spawn");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The line that begins with `what`, without that.
fn line<'a>(text: &'a str, what: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(what))
}

#[test]
#[ignore = "the child of the tests below"]
fn role_loads() {
    let other = std::env::var_os(OTHER).map(|path| {
        #[allow(unsafe_code)]
        // SAFETY: it has no initialisers.
        unsafe { libloading::Library::new(path) }.expect("the other library")
    });
    let place = std::env::var_os("CROSSRAIL_UCX_LIBRARY").map(PathBuf::from);
    match crossrail_ucx::Library::load(place.as_deref(), crossrail_types::Log(crossrail_types::LogLevel::Warn)) {
        Err(absent) => println!("\nabsent: {} ({})", absent.why, absent.fix.unwrap_or_default()),
        Ok(library) => match Fabric::open(library, Some(&["tcp".to_owned()]), Some("lo")) {
            Err(error) => println!("\nrefused: {error}"),
            Ok(fabric) => {
                let (lane, _peer) = pair(&fabric);
                println!("\nlane: {} of UCX {} of {}", lane.selected(), library.version(), loaded_files().join(" "));
            }
        },
    }
    drop(other);
}

#[test]
fn another_interface_is_refused_by_name() {
    for (major, minor, without, expected) in [
        (2, 0, "", "the UCX found is 2.0.1, of another major version than 1"),
        (0, 9, "", "the UCX found is 0.9.1, of another major version than 1"),
        (1, 11, "", "the UCX found is 1.11.1; 1.12 is the oldest that works"),
        (1, 12, "ucp_am_recv_data_nbx", "has no function ucp_am_recv_data_nbx: it is older than UCX 1.12"),
    ] {
        let Some(folder) = stub(major, minor, without) else { return };
        let text = child(Some(&folder), None, None);
        let absent = line(&text, "absent: ").unwrap_or_else(|| panic!("{text}"));
        assert!(absent.contains(expected) && absent.contains("apt install libucx0"), "{absent}");
    }
}

#[test]
fn newer_protocols_are_off_where_they_would_end_the_process() {
    for (minor, setting, expected) in [
        (15, None, None),
        (16, None, Some("PROTO_ENABLE=n")),
        (17, None, Some("PROTO_ENABLE=n")),
        (17, Some(("UCX_PROTO_ENABLE", "y")), None),
        (18, None, None),
    ] {
        let Some(folder) = stub(1, minor, "") else { return };
        let text = child(Some(&folder), None, setting);
        assert!(line(&text, "refused: ").is_some(), "{text}");
        assert_eq!(
            line(&text, "set: PROTO").map(|rest| format!("PROTO{rest}")).as_deref(),
            expected,
            "1.{minor}: {text}"
        );
    }
}

#[test]
fn a_second_ucx_of_the_process_is_named_and_leaves_lanes_alone() {
    if library().is_none() {
        return;
    }
    let Some(folder) = stub(2, 0, "") else { return };
    let other = folder.join("libucp-1a2b3c4d.so.0");
    std::fs::copy(folder.join("libucp.so.0"), &other).expect("a copy");
    let text = child(None, Some(&other), None);
    let lane = line(&text, "lane: ").unwrap_or_else(|| panic!("{text}"));
    assert!(lane.starts_with("tcp/lo of UCX 1.") && lane.contains(&*other.to_string_lossy()), "{lane}");
    assert_eq!(lane.matches("/libucp").count(), 2, "{lane}");
}
