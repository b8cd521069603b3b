//! The driver against a plugin in C (tests/data/net_plugin), well-behaved and not, in every version.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crossrail_nccl_driver::{Lanes, Memory, Network, Plugin, Receiver, Sender};
use crossrail_types::{Error, ErrorKind, Result};

const SIZE: usize = 300_000;
const LIMIT: Duration = Duration::from_secs(20);
/// How long a transfer may stand still here.
const STUCK: Duration = Duration::from_millis(50);

/// The plugin of a version, under a name that selects a fault. Each version is compiled once.
fn library(version: u32, fault: &str) -> PathBuf {
    static COMPILED: Mutex<BTreeMap<u32, PathBuf>> = Mutex::new(BTreeMap::new());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("net-plugin-{}", std::process::id()));
    let mut compiled = COMPILED.lock().expect("no test panics while it compiles");
    let one = compiled.entry(version).or_insert_with(|| {
        std::fs::create_dir_all(&folder).expect("a folder");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/net_plugin/plugin.c");
        let path = folder.join(format!("{version}.so"));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC"]).arg(format!("-DVERSION={version}")).arg("-o").arg(&path).arg(source);
        assert!(compiler.status().expect("a C compiler").success());
        path
    });
    let path = folder.join(format!("{version}-libref-{fault}.so"));
    std::fs::copy(one, &path).expect("a copy");
    path
}

fn lanes(devices: usize) -> Lanes {
    Lanes { devices: (0..devices).collect(), channels: 2, window: 16, chunk: 10_000 }
}

/// One transfer between two ends of `network`, verified.
fn transfer(network: &Network<'_>, lanes: Lanes) -> Result<()> {
    let mut receiver = Receiver::new(network, lanes.clone(), Memory::new(SIZE)?)?;
    let mut sender = Sender::new(network, lanes.clone(), Memory::new(SIZE)?, &receiver.handles())?;
    let mut moved_at = Instant::now();
    loop {
        let (connected, accepted) = (sender.connect()?, receiver.accept()?);
        match (connected, accepted, moved_at.elapsed() > STUCK) {
            (true, true, _) => break,
            (false, _, true) => return Err(sender.not_connected(STUCK)),
            (_, false, true) => return Err(receiver.not_connected(STUCK)),
            _ => {}
        }
    }
    let began = Instant::now();
    for round in 1..=3 {
        sender.bytes()?.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / round % 251) as u8);
        let sent = sender.bytes()?.to_vec();
        receiver.begin();
        let (mut announced, mut left) = (Vec::new(), sender.chunks() + receiver.chunks());
        moved_at = Instant::now();
        while left > 0 {
            assert!(began.elapsed() < LIMIT);
            let (received, one) = receiver.step(&mut announced)?;
            announced.drain(..).try_for_each(|chunk| sender.assign(chunk))?;
            let (delivered, other) = sender.step()?;
            left -= received + delivered;
            if one || other {
                moved_at = Instant::now();
            } else if moved_at.elapsed() > STUCK {
                let stuck = receiver.stuck(STUCK);
                return Err(if stuck.detail.contains("irecv") { stuck } else { sender.stuck(STUCK) });
            }
        }
        if receiver.bytes()? != sent {
            return Err(Error::new(ErrorKind::Protocol, "verify", "the data differs"));
        }
        let report = receiver.take_report();
        assert_eq!(report.lanes.iter().map(|lane| lane.bytes).sum::<u64>(), SIZE as u64);
        assert!(report.lanes.iter().all(|lane| lane.chunks > 0), "every device has a share: {report:?}");
    }
    sender.close()?;
    receiver.close()
}

fn run(path: &Path) -> Result<()> {
    let plugin = Plugin::open(path)?;
    let network = plugin.init()?;
    let devices = network.devices()?;
    transfer(&network, lanes(devices))
}

#[test]
fn every_version_moves_data_over_all_its_devices() {
    for version in 4..=12 {
        let path = library(version, "none");
        let plugin = Plugin::open(&path).expect("a plugin");
        assert_eq!((plugin.name(), plugin.version()), ("Reference", version));
        let network = plugin.init().expect("init");
        let properties = network.properties(1).expect("properties");
        assert_eq!((properties.name.as_str(), properties.speed_mbps), ("ref1", 25_000));
        assert_eq!(properties.latency_us, if version == 4 { 0.0 } else { 2.5 });
        transfer(&network, lanes(2)).unwrap_or_else(|error| panic!("version {version}: {error}"));
    }
}

#[test]
fn fragments_are_gathered_before_their_memory_is_returned() {
    run(&library(11, "fragments")).expect("a transfer");
}

#[test]
fn a_slow_plugin_is_not_a_broken_one() {
    run(&library(8, "slow")).expect("a transfer");
}

#[test]
fn what_a_plugin_may_not_return_is_an_error_that_names_the_function() {
    let faults = [
        ("init-refuses", ErrorKind::Io, "init of Reference (v11) returned ncclInternalError (3): reference plugin: no"),
        ("no-devices", ErrorKind::Io, "devices of Reference (v11) reports 0 devices"),
        ("no-name", ErrorKind::Io, "getProperties of Reference (v11) gives device 0 no name"),
        ("listen-null", ErrorKind::Io, "listen of Reference (v11) succeeded without a listener"),
        ("connect-null", ErrorKind::Timeout, "connect of Reference (v11) returned no communicator"),
        ("accept-null", ErrorKind::Timeout, "accept of Reference (v11) returned no communicator"),
        (
            "regmr-refuses",
            ErrorKind::Io,
            "regMr of Reference (v11) returned ncclInternalError (3): reference plugin: no",
        ),
        ("isend-busy", ErrorKind::Timeout, "isend of Reference (v11) returned no request"),
        ("irecv-busy", ErrorKind::Timeout, "irecv of Reference (v11) returned no request"),
        (
            "isend-error",
            ErrorKind::Io,
            "isend of Reference (v11) returned ncclInternalError (3): reference plugin: the",
        ),
        ("never-done", ErrorKind::Timeout, "test of Reference (v11) reports"),
        ("short", ErrorKind::Io, "test of Reference (v11) reports 9999 bytes for a"),
        ("half-lost", ErrorKind::Protocol, "the data differs"),
    ];
    for (fault, kind, text) in faults {
        let error = run(&library(11, fault)).expect_err(fault);
        assert_eq!(error.kind, kind, "{fault}: {error}");
        assert!(error.to_string().contains(text), "{fault}: {error}");
    }
}

#[test]
fn the_window_is_checked_before_anything_is_posted() {
    let path = library(9, "window");
    let plugin = Plugin::open(&path).expect("a plugin");
    let network = plugin.init().expect("init");
    for window in [16, 17] {
        let lanes = Lanes { devices: vec![1], channels: 1, window, chunk: 1000 };
        let memory = || Memory::new(SIZE).expect("memory");
        let mut receiver = Receiver::new(&network, lanes.clone(), memory()).expect("a receiver");
        let mut sender = Sender::new(&network, lanes, memory(), &receiver.handles()).expect("a sender");
        while !(sender.connect().expect("connect") & receiver.accept().expect("accept")) {}
        receiver.begin();
        let mut announced = Vec::new();
        let outcome = (0..40).try_for_each(|_| receiver.step(&mut announced).map(drop));
        assert_eq!(announced.len(), 16, "nothing was sent, so that nothing completed");
        if window == 16 {
            outcome.expect("the plugin takes 16");
        } else {
            let error = outcome.expect_err("the plugin does not take 17").to_string();
            assert!(error.contains("irecv of Reference (v9)") && error.contains("beyond the window"), "{error}");
        }
    }
}

#[test]
fn a_library_that_is_no_plugin_or_of_another_age_is_refused_by_name() {
    let refused = |path: &Path| {
        let error = Plugin::open(path).expect_err("no plugin");
        assert_eq!(error.kind, ErrorKind::Usage);
        error.to_string()
    };
    let missing = refused(Path::new("/nonexistent/libnccl-net.so"));
    assert!(missing.contains("cannot be loaded") && missing.contains("No such file"), "{missing}");
    assert!(refused(Path::new("libc.so.6")).contains("not an NCCL network plugin"));
    for (version, age) in [(3, "old"), (13, "new")] {
        let said = refused(&library(version, "none"));
        assert!(said.contains(&format!("version {version}, which is too {age}: 4 to 12 are supported")), "{said}");
    }
}
