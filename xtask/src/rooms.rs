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
    /// What it is for, for the table in CONTRIBUTING.md.
    pub(crate) purpose: &'static str,
}

const fn room(name: &'static str, package: &'static str, uses: &'static [&'static str], purpose: &'static str) -> Room {
    Room { name, package, uses, outside: None, forbids_unsafe: false, for_tests: false, purpose }
}

/// Backends (shm, tcp) never depend on each other, nor do proto and transport; only the engine selects a backend.
pub(crate) const ROOMS: &[Room] = &[
    Room {
        outside: Some(&[]),
        forbids_unsafe: true,
        ..room("types", "crossrail-types", &[], "ids, sizes, settings, errors")
    },
    Room {
        outside: Some(&["slab"]),
        forbids_unsafe: true,
        ..room("proto", "crossrail-proto", &["types"], "the protocol: no I/O, no clock, no unsafe code")
    },
    room("locks", "crossrail-locks", &["types"], "locks and statics that a forked child can use"),
    room(
        "sight",
        "crossrail-sight",
        &["locks", "types"],
        "the page of counters in shared memory that other processes read",
    ),
    room(
        "transport",
        "crossrail-transport",
        &["types"],
        "the traits of lanes and of one-sided writes, words and doorbells in shared memory, the loopback lane, the conformance suites",
    ),
    Room {
        forbids_unsafe: true,
        ..room("topology", "crossrail-topology", &["types"], "discovery of network devices, GPUs, NUMA nodes")
    },
    room(
        "shm",
        "crossrail-shm",
        &["locks", "topology", "transport", "types"],
        "shared memory: rings, mapped memory, single copies",
    ),
    room(
        "tcp",
        "crossrail-tcp",
        &["locks", "transport", "types"],
        "TCP connections; shm and tcp never depend on each other",
    ),
    room(
        "ucx",
        "crossrail-ucx",
        &["locks", "transport", "types"],
        "lanes over UCX, which is loaded at run time; its C interface in one file",
    ),
    room(
        "fabric",
        "crossrail-fabric",
        &["locks", "transport", "types"],
        "one-sided writes over libfabric, which is loaded at run time; its C interface in one file",
    ),
    Room {
        forbids_unsafe: true,
        ..room(
            "handshake",
            "crossrail-handshake",
            &["locks", "tcp", "types"],
            "mutual authentication of two ends; worker addresses, sessions, lane admission; no unsafe code",
        )
    },
    room(
        "cuda",
        "crossrail-cuda",
        &["locks", "types"],
        "the CUDA driver and NVRTC, loaded at run time; a missing driver is a state, not an error",
    ),
    room(
        "kernels",
        "crossrail-kernels",
        &["locks", "cuda", "types"],
        "GPU kernels: sources, and one launcher per kernel",
    ),
    Room {
        for_tests: true,
        ..room(
            "emulator",
            "crossrail-emulator",
            &["kernels", "cuda", "types"],
            "an emulated GPU that runs the kernels and checks every memory access; a dependency of tests only",
        )
    },
    room(
        "cuda-ipc",
        "crossrail-cuda-ipc",
        &["locks", "cuda", "kernels", "transport", "types"],
        "GPU memory of another process on this machine: handles, imports, copies",
    ),
    room(
        "gpu",
        "crossrail-gpu",
        &["locks", "shm", "topology", "cuda-ipc", "kernels", "cuda", "types"],
        "GPU memory for the engine: whose memory an address is, allocation, staging through pinned memory, simulated GPUs",
    ),
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
            "fabric",
            "ucx",
            "handshake",
            "topology",
            "gpu",
            "cuda-ipc",
            "kernels",
            "cuda",
            "types",
        ],
        "Context, Worker, Endpoint, Region, Request; the only crate that selects a backend",
    ),
    Room {
        forbids_unsafe: true,
        ..room(
            "control",
            "crossrail-control",
            &["locks", "sight", "handshake", "types"],
            "the store, ranks, groups, membership; no unsafe code",
        )
    },
    room(
        "ep",
        "crossrail-ep",
        &["locks", "engine", "control", "types"],
        "what expert buffers share: configuration, rendezvous of ranks, faults",
    ),
    room(
        "ep-host",
        "crossrail-ep-host",
        &["locks", "sight", "transport", "engine", "control", "ep", "types"],
        "dispatch and combine in host memory: heaps, routing, row kernels",
    ),
    room(
        "ep-cuda",
        "crossrail-ep-cuda",
        &["locks", "sight", "transport", "engine", "control", "ep", "emulator", "kernels", "cuda", "types"],
        "dispatch and combine in GPU memory: the host side of the kernels",
    ),
    Room {
        outside: Some(&[]),
        forbids_unsafe: true,
        ..room(
            "nccl-abi",
            "crossrail-nccl-abi",
            &[],
            "the C layouts of NCCL's network plugins, versions 4 to 12, and RMA plugins, 13 to 16",
        )
    },
    room(
        "nccl-driver",
        "crossrail-nccl-driver",
        &["locks", "nccl-abi", "types"],
        "loads network plugins of NCCL and moves data through them",
    ),
    room(
        "nccl-plugin",
        "crossrail-nccl-plugin",
        &["locks", "transport", "engine", "topology", "cuda", "nccl-abi", "nccl-driver", "types"],
        "Crossrail as such plugins: `libnccl-net-crossrail.so`",
    ),
    room(
        "capi",
        "crossrail-capi",
        &["locks", "engine", "control", "ep-host", "ep-cuda", "types"],
        "the C interface: `crossrail.h`, `crossrail_experts.h`, and what `libcrossrail.so` is linked from; no logic",
    ),
    room(
        "bench",
        "crossrail-bench",
        &["engine", "ep", "ep-host", "ep-cuda", "control", "nccl-driver", "types"],
        "measuring loops; returns raw samples",
    ),
    room(
        "python",
        "crossrail-python",
        &["locks", "sight", "engine", "control", "ep", "ep-host", "ep-cuda", "bench", "types"],
        "conversion, GIL, exceptions; no logic",
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
    ("crates/python/src/runtime", &["crate::borrow", "crate::objects", "crate::experts", "crate::bench"], BINDINGS),
    ("crates/python/src/borrow", &["crate::objects", "crate::experts", "crate::bench"], BINDINGS),
    ("crates/python/src/objects", &["crate::experts", "crate::bench"], BINDINGS),
    ("crates/python/src/experts", &["crate::bench"], BINDINGS),
];

const BINDINGS: &str = "a folder of the bindings uses only those below it: runtime, borrow, objects, experts, bench";

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
        "python/crossrail_tools/verify",
        &["_native", "rich"],
        "what is measured is compared with the reference, not with the implementation",
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
