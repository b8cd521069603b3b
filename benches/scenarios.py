"""The scenarios of `make bench`, in the order in which they run."""

from __future__ import annotations

import checksums
import fabric
import groups
import instructions
import messages
import rails
import rows
from harness import Scenario

SCENARIOS = (
    Scenario("shm-latency", "shared memory, 8 B latency against UCX", "<= 0.75 x ucx", messages.shm_latency),
    Scenario("shm-bandwidth", "shared memory bandwidth against UCX", ">= 1.6 or 1.2 x ucx", messages.shm_bandwidth),
    Scenario(
        "tcp-bandwidth",
        "128 KiB to 64 MiB over TCP loopback, against UCX, iperf3",
        ">= 1.3 x ucx",
        messages.tcp_bandwidth,
    ),
    Scenario("tcp-latency", "TCP over loopback, 8 B latency against UCX", "<= 1 x ucx", messages.tcp_latency),
    Scenario("ucx-tcp", "a lane over UCX's tcp against UCX", "<= 1.15, >= 0.95 x ucx", messages.ucx_tcp),
    Scenario("ucx-memory", "a lane over UCX's posix, sysv, cma", "<= 1.15, >= 0.95 x ucx", messages.ucx_memory),
    Scenario(
        "fabric",
        "lanes and one-sided writes over libfabric against a bare loop of its calls",
        "<= 1.15, >= 0.95 x bare, rows >= 3 x nixl",
        fabric.beside_bare,
    ),
    Scenario("checksums", "a lane over TCP with checksums, beside one without", "shown", checksums.cost),
    Scenario("pairs", "eight pairs of processes at once, against one pair", ">= 0.9 x one pair", messages.pairs),
    Scenario("rails-equal", "four equal rails against four iperf3 at once", ">= 0.95 x iperf3", rails.equal),
    Scenario("rails-uneven", "rails of 2, 2, 1, 0.5 Gbit/s", ">= 0.93 x their sum", rails.uneven),
    Scenario("rails-eight", "eight rails of unequal rates against eight iperf3", ">= 0.95 x iperf3", rails.eight),
    Scenario("rails-bloated", "one of four rails behind a queue of 20 ms", ">= 0.95 x iperf3", rails.bloated),
    Scenario("rails-long", "1 Gbit/s behind a queue of 100 ms", ">= 0.95 x iperf3", rails.long),
    Scenario("rails-flapping", "one of four rails flaps every second", ">= 0.95 x three rails", rails.flapping),
    Scenario("rails-ucx", "four rails over UCX's tcp beside our own TCP", "within 10 %, shares even", rails.over_ucx),
    Scenario("rails-down", "one of four rails set down in mid-transfer", "<= three rails + 1 s", rails.down),
    Scenario("python-overhead", "8 B ping-pong driven from Python", "<= native + 2 us", messages.python_overhead),
    Scenario("ep-decode", "dispatch and combine, decode, against MPI_Alltoallv", ">= 1.5 x mpi", groups.decode),
    Scenario("ep-prefill", "dispatch and combine, prefill, against MPI_Alltoallv", ">= 1.5 x mpi", groups.prefill),
    Scenario("ep-wire", "dispatch of large rows against one memcpy", ">= 0.7 x memcpy", groups.wire),
    Scenario("ep-cast", "bf16 to fp8 with scales against memcpy", ">= 0.5 x memcpy", groups.cast),
    Scenario("ep-killed", "a rank killed in mid-operation", "<= 1.2 s", groups.killed),
    Scenario("ep-growth", "dispatch and combine as ranks grow", "shown", groups.growth),
    Scenario("control", "init, connect, disconnect, reconnect, destroy of 8 ranks", "<= 150 ms", groups.control),
    Scenario("kv", "lists of rows, beside NIXL and Mooncake", ">= 10, 8, 2 x nixl, half of its CPU time", rows.kv),
    Scenario(
        "instructions",
        "instructions of a round trip, counted by callgrind",
        "<= 1.02 x baseline",
        instructions.count_all,
    ),
)
