//! The crates of the workspace ("rooms") and their permitted dependencies. ARCHITECTURE.md describes the same layout.

/// A crate below `crates/`.
pub(crate) struct Room {
    /// The folder name.
    pub(crate) name: &'static str,
    /// The package name.
    pub(crate) package: &'static str,
    /// The rooms it may depend on, by folder name, including for tests. Dependencies point down only.
    pub(crate) uses: &'static [&'static str],
    /// The external crates it may depend on; `None`: all that the workspace pins.
    pub(crate) outside: Option<&'static [&'static str]>,
    /// Whether its lib.rs must contain `#![forbid(unsafe_code)]`.
    pub(crate) forbids_unsafe: bool,
    /// Whether other rooms may use it in their tests only.
    pub(crate) for_tests: bool,
}

const fn room(name: &'static str, package: &'static str, uses: &'static [&'static str]) -> Room {
    Room { name, package, uses, outside: None, forbids_unsafe: false, for_tests: false }
}

/// Backends (shm, tcp) never depend on each other, nor do proto and transport; only the engine selects a backend.
pub(crate) const ROOMS: &[Room] = &[
    Room { outside: Some(&[]), forbids_unsafe: true, ..room("types", "crossrail-types", &[]) },
    Room { outside: Some(&["slab"]), forbids_unsafe: true, ..room("proto", "crossrail-proto", &["types"]) },
    room("locks", "crossrail-locks", &["types"]),
    room("sight", "crossrail-sight", &["locks", "types"]),
    room("transport", "crossrail-transport", &["types"]),
    Room { forbids_unsafe: true, ..room("topology", "crossrail-topology", &["types"]) },
    room("shm", "crossrail-shm", &["locks", "topology", "transport", "types"]),
    room("tcp", "crossrail-tcp", &["transport", "types"]),
    room("ucx", "crossrail-ucx", &["locks", "transport", "types"]),
    Room { forbids_unsafe: true, ..room("handshake", "crossrail-handshake", &["locks", "tcp", "types"]) },
    room("cuda", "crossrail-cuda", &["locks", "types"]),
    room("kernels", "crossrail-kernels", &["locks", "cuda", "types"]),
    Room { for_tests: true, ..room("emulator", "crossrail-emulator", &["kernels", "cuda", "types"]) },
    room("cuda-ipc", "crossrail-cuda-ipc", &["locks", "cuda", "kernels", "transport", "types"]),
    room("gpu", "crossrail-gpu", &["locks", "shm", "topology", "cuda-ipc", "kernels", "cuda", "types"]),
    room(
        "engine",
        "crossrail",
        &[
            "locks",
            "sight",
            "proto",
            "transport",
            "shm",
            "tcp",
            "ucx",
            "handshake",
            "topology",
            "gpu",
            "cuda-ipc",
            "kernels",
            "cuda",
            "types",
        ],
    ),
    Room { forbids_unsafe: true, ..room("control", "crossrail-control", &["locks", "sight", "handshake", "types"]) },
    room("ep", "crossrail-ep", &["locks", "engine", "control", "types"]),
    room("ep-host", "crossrail-ep-host", &["locks", "sight", "transport", "engine", "control", "ep", "types"]),
    room(
        "ep-cuda",
        "crossrail-ep-cuda",
        &["locks", "sight", "engine", "control", "ep", "emulator", "kernels", "cuda", "types"],
    ),
    Room { outside: Some(&[]), forbids_unsafe: true, ..room("nccl-abi", "crossrail-nccl-abi", &[]) },
    room("nccl-driver", "crossrail-nccl-driver", &["locks", "nccl-abi", "types"]),
    room("nccl-plugin", "crossrail-nccl-plugin", &["locks", "engine", "topology", "nccl-abi", "nccl-driver", "types"]),
    room("bench", "crossrail-bench", &["engine", "ep", "ep-host", "ep-cuda", "control", "nccl-driver", "types"]),
    room(
        "python",
        "crossrail-python",
        &["locks", "sight", "engine", "control", "ep", "ep-host", "ep-cuda", "bench", "types"],
    ),
];

/// Files in which statics may be locks: what is only set and read there never waits, or only tests use it.
pub(crate) const LOCKED_STATICS: &[&str] = &["crates/types/src/log.rs", "crates/emulator/"];

/// Names that must not appear in the sources below a folder (except its tests), and why.
pub(crate) const WORDS: &[(&str, &[&str], &str)] = &[
    ("crates", &["parking_lot::"], "its waiting threads are listed in memory that a forked child inherits: use locks"),
    (
        "crates/proto/src",
        &["std::net", "std::fs", "std::io", "std::os", "std::thread", "Instant::now", "SystemTime"],
        "proto does no I/O and takes time as input, so that its tests are deterministic",
    ),
    (
        "crates/engine/src/memory",
        &["crate::environment", "crate::core", "crate::progress", "crate::session", "crate::api"],
        LAYERS,
    ),
    ("crates/engine/src/environment", &["crate::core", "crate::progress", "crate::session", "crate::api"], LAYERS),
    ("crates/engine/src/core", &["crate::environment", "crate::progress", "crate::session", "crate::api"], LAYERS),
    ("crates/engine/src/progress", &["crate::session", "crate::api"], LAYERS),
    ("crates/engine/src/session", &["crate::api"], LAYERS),
];

const LAYERS: &str =
    "a module of the engine uses only those below it: memory, environment, core, progress, session, api";

const TOOLS: &[&str] = &["crossrail_tools", "rich"];

/// Files that no rule of `PYTHON` is about: they run a tool for whoever runs the library as a program.
pub(crate) const DOORS: &[&str] = &["python/crossrail/__main__.py"];

/// Modules that Python files below a folder must not import, and why. The rule of an inner folder replaces that of an
/// outer one.
pub(crate) const PYTHON: &[(&str, &[&str], &str)] = &[
    ("python/crossrail", TOOLS, "the tools import the library, never the other way"),
    (
        "python/crossrail/ref",
        &["_native", "crossrail_tools", "rich"],
        "a reference implementation shares no code with the implementation it verifies, nor with tools",
    ),
    (
        "python/crossrail_tools/report",
        &["_native", "crossrail"],
        "reports are generated from JSON, also on machines without the library",
    ),
    ("python/crossrail_tools/planning", &["_native", "crossrail"], "plans are made on machines without the library"),
    (
        "python/crossrail_tools/cli",
        &["numpy", "torch", "statistics", "timeit"],
        "the command contains no measuring logic, which belongs to crates/bench",
    ),
    (
        "python/crossrail_tools/cli/doctor",
        &["torch", "timeit"],
        "doctor compares what two processes exchange, and how fast rails are; benches measure in crates/bench",
    ),
];
