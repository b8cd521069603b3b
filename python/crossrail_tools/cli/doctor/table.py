"""The table of checks: what each tests, its severities, and the usual fix. `docs/doctor.md` is generated from it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from . import fabric, job, limits, nics, rails, transports
from . import gpus as gpu_checks
from .finding import Check

GROUPS = {
    "settings": "the CROSSRAIL_ variables of this shell",
    "transports": "each transport, by moving data between two processes",
    "limits": "what this process may use: memory, processors, descriptors, system calls, the clock",
    "gpus": "GPUs, by moving data",
    "network": "the network devices that carry data",
    "rails": "the rails to another machine, where `crossrail doctor --listen` runs (`--peer`)",
    "store": "the store of a job (`--store`)",
    "nccl": "Crossrail as NCCL's network (`--nccl`)",
    "fabric": "libfabric and its devices, by writing over them (`--fabric`)",
    "launcher": "the variables of a launcher (`--torchrun`, `--slurm`)",
}
"""The groups of checks, in the order in which they run. Those with an option run only when it is given."""

OPTIONAL = {
    "rails": "--peer",
    "store": "--store",
    "nccl": "--nccl",
    "fabric": "--fabric",
    "launcher": "--torchrun or --slurm",
}
"""The groups that run only with an option, and that option."""

NEED_GPUS = frozenset({"gpu-kernel", "gpu-pinned", "gpu-export", "gpu-ipc", "gpu-pairs", "nic-distance"})


def _of(group: str, limit_s: float, *checks: Check) -> list[Check]:
    """The checks of a group, and the limit of those that have none of their own."""
    return [replace(check, group=group, limit_s=check.limit_s or limit_s) for check in checks]


CHECKS = (
    *_of(
        "settings",
        10,
        Check(
            "settings",
            "A context and a worker are made with the settings of the environment.",
            "error for each setting that is refused; the other checks run without it",
            "`unset NAME`, or a value that `crossrail info` lists",
            limits.settings,
        ),
    ),
    *_of(
        "transports",
        45,
        Check(
            "shm",
            "Two processes send 16 MiB to each other over shared memory, and compare it.",
            "error if it fails or the data differs",
            "allow memfd_create and Unix sockets: `docker run --security-opt seccomp=unconfined`",
            transports.shared_memory,
            because=("system-calls", "memfd_create"),
        ),
        Check(
            "cma",
            "Two processes read and write each other's memory (cross-memory attach).",
            "warning if the kernel refuses: large messages then take two copies",
            "`sysctl -w kernel.yama.ptrace_scope=0`, or `docker run --cap-add=SYS_PTRACE`",
            transports.single_copy,
        ),
        Check(
            "mapped",
            "One process maps 16 MiB of `Context.alloc` of another, and compares it.",
            "error if it fails or the data differs",
            "allow memfd_create and Unix sockets: `docker run --security-opt seccomp=unconfined`",
            transports.mapped_memory,
            because=("system-calls", "memfd_create"),
        ),
        Check(
            "fd-passing",
            "A memfd is passed over a Unix socket and written by both ends; then pidfd_getfd is tried.",
            "error if the descriptor or the data does not arrive, note if only pidfd_getfd is refused",
            "`docker run --cap-add=SYS_PTRACE`",
            transports.passed_descriptors,
            because=("system-calls", "memfd_create"),
        ),
        Check(
            "tcp-loopback",
            "Two processes send 16 MiB to each other over TCP on this machine.",
            "error if it fails or the data differs",
            "`ip link set lo up`",
            transports.loopback_tcp,
        ),
        Check(
            "further-transports",
            "Two processes send 16 MiB to each other over every further transport that this build has, such as UCX.",
            "error if it fails or the data differs, warning if another transport carries it, note if it is unusable",
            "what `crossrail info` names for that transport",
            transports.further_transports,
            limit_s=60,
        ),
        Check(
            "registration",
            "Regions of 1, 4 and 16 GiB, as far as half of the free memory goes, are registered and written to"
            " their end.",
            "error if one is refused, note if too little memory is free",
            "`ulimit -l unlimited`, or register in smaller pieces",
            transports.registration,
            limit_s=30,
        ),
    ),
    *_of(
        "limits",
        5,
        Check(
            "descriptors",
            f"{limits.ENOUGH_DESCRIPTORS} descriptors are opened.",
            "warning if that fails",
            f"`ulimit -n {limits.ENOUGH_DESCRIPTORS}`",
            limits.descriptors,
        ),
        Check(
            "memlock",
            "64 MiB are locked.",
            "warning if that fails and the machine has RDMA devices, else note",
            "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`",
            limits.locked_memory,
        ),
        Check(
            "processors",
            "The processors that affinity and the control groups leave, and how often the quota ran out.",
            "warning below two processors, and if the control group was throttled",
            "`docker run --cpus 4`, `srun --cpus-per-task 4`",
            limits.processors,
        ),
        Check(
            "memory",
            "The memory that is free within the limits of the control groups, and processes killed for want of it.",
            "warning below 1 GiB, note if the out-of-memory killer was at work",
            "`docker run --memory`, `srun --mem`",
            limits.memory,
        ),
        Check(
            "dev-shm",
            "A file is made in /dev/shm. Crossrail needs none; NCCL, MPI and PyTorch do.",
            "note if that fails, or if less than 1 GiB is free",
            "`docker run --ipc=host`, or `--shm-size=8g`",
            limits.shared_memory_folder,
        ),
        Check(
            "system-calls",
            "System calls that containers often forbid are made: memfd_create, process_vm_readv, pidfd_open and "
            "others.",
            "error if shared memory needs it, else note",
            "`docker run --security-opt seccomp=unconfined`",
            limits.system_calls,
        ),
        Check(
            "huge-pages",
            "Whether the kernel backs large buffers with huge pages.",
            "note if they are off",
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
            limits.huge_pages,
        ),
        Check(
            "pci-access",
            "Whether ACS of the PCI bridges, or the IOMMU, sends traffic between devices through the host.",
            "warning if a bridge redirects and there are GPUs, note if the IOMMU translates or only root can read it",
            "`setpci -s BRIDGE ECAP_ACS+6.w=0000`; `iommu=pt` on the kernel's command line",
            limits.direct_access,
            limit_s=10,
        ),
        Check(
            "clock",
            "The clock is read many times, and the kernel is asked whether it is synchronized.",
            "warning if reading it is slow, note if it is not synchronized",
            "`systemctl enable --now chrony`",
            limits.clock,
        ),
    ),
    *_of(
        "gpus",
        60,
        Check(
            "gpu-driver",
            "The CUDA driver is loaded, and its GPUs are compared with those on the PCI bus.",
            "error if there are GPUs that CUDA cannot use, note if there is none or CUDA offers fewer",
            "install NVIDIA's driver; `docker run --gpus all`",
            gpu_checks.driver,
            limit_s=20,
        ),
        Check(
            "gpu-kernel",
            "On each GPU a kernel is compiled by NVRTC and scatters 16 MiB.",
            "error if it fails",
            "`pip install nvidia-cuda-nvrtc`, or `CROSSRAIL_UNPACK=d2d`",
            gpu_checks.kernels,
        ),
        Check(
            "gpu-pinned",
            "16 MiB are copied from pinned host memory to each GPU.",
            "error if it fails",
            "`ulimit -l unlimited`",
            gpu_checks.pinned_memory,
            limit_s=30,
            because=("memlock", ""),
        ),
        Check(
            "gpu-export",
            "Memory of `Context.alloc` on each GPU is exported as a descriptor, and another process copies into it.",
            "error if it fails, warning if the copy is staged in host memory",
            "`docker run --ipc=host` for both containers",
            gpu_checks.exported_memory,
        ),
        Check(
            "gpu-ipc",
            "The same with memory of cudaMalloc, as PyTorch allocates it, by its IPC handle.",
            "as for `gpu-export`",
            "`docker run --ipc=host --pid=host` for both containers",
            gpu_checks.legacy_handles,
        ),
        Check(
            "gpu-pairs",
            "64 MiB are copied between each two GPUs by two processes, in both directions, and timed.",
            "warning without peer access, and for a pair below half of the median rate",
            "`nvidia-smi topo -m`, `systemctl restart nvidia-fabricmanager`",
            gpu_checks.pairs,
            limit_s=240,
        ),
    ),
    *_of(
        "network",
        5,
        Check(
            "nic-link",
            "Every network device with an address, also those that are down.",
            "warning if one is down or has no link",
            "`ip link set DEVICE up`",
            nics.link_state,
        ),
        Check(
            "nic-speed",
            "The speeds that the devices have negotiated.",
            "note if they differ",
            "`ethtool DEVICE`; `CROSSRAIL_NET_DEVICES=^DEVICE`",
            nics.speeds,
        ),
        Check(
            "nic-mtu",
            "The MTU of each device.",
            "warning if one is smaller than usual at its speed, note below 9000 from 25 Gbit/s on",
            "`ip link set DEVICE mtu 9000`, on both ends and the switch",
            nics.mtus,
        ),
        Check(
            "nic-address",
            "Whether devices share a subnet, and by which of them the kernel then sends.",
            "warning if they do and all send by one",
            "`ip rule add from ADDRESS table N`, with a route in that table",
            nics.addresses,
        ),
        Check(
            "nic-route",
            "The kernel is asked by which device it sends to the subnet of each device.",
            "warning if by another one, or not at all",
            "`ip route del ENTRY`, `ip route replace SUBNET dev DEVICE src ADDRESS`",
            nics.routes,
        ),
        Check(
            "nic-filter",
            "Reverse-path filters of devices that share a subnet.",
            "warning if they are strict",
            "`sysctl -w net.ipv4.conf.DEVICE.rp_filter=2`",
            nics.filters,
        ),
        Check(
            "nic-queues",
            "Receive queues of physical devices, and the processors of their interrupts.",
            "warning if all interrupts are on one processor, or on another NUMA node; note for one queue",
            "`ethtool -L DEVICE combined 4`, `systemctl start irqbalance`",
            nics.queues,
        ),
        Check(
            "nic-distance",
            "The distance of each GPU to the nearest network device.",
            "note if all are across the NUMA boundary, or the distance is unknown",
            "`CROSSRAIL_NET_DEVICES=near`",
            nics.distances,
        ),
        Check(
            "nic-load",
            "One process sends to another over TCP for a second; segments sent again and packets lost are counted.",
            "warning above 1 % of segments, and for any packet lost",
            "`sysctl -w net.core.netdev_max_backlog=65536`",
            transports.under_load,
            limit_s=30,
            because=("tcp-loopback", ""),
        ),
        Check(
            "socket-buffers",
            "The largest windows of TCP's autotuning, and what a socket gets that asks for 4 MiB.",
            "warning below 4 MiB with a device of 10 Gbit/s or more, else note",
            "`sysctl -w net.ipv4.tcp_wmem='4096 131072 16777216'`",
            limits.socket_buffers,
        ),
        Check(
            "congestion",
            "The congestion control that a new socket has.",
            "note for one that is slow on fast links",
            "`sysctl -w net.ipv4.tcp_congestion_control=cubic`",
            limits.congestion_control,
        ),
    ),
    *_of(
        "rails",
        5,
        Check(
            "rail-down",
            "The links of both ends of each rail.",
            "error if one is down or has no link, or if no rail has a counterpart",
            "`ip link set DEVICE up` at the end that is named",
            rails.down,
        ),
        Check(
            "rail-route",
            "Both kernels are asked by which device they send from each rail to its counterpart.",
            "error if by another one, or not at all",
            "`ip route del ENTRY`, `ip route replace SUBNET dev DEVICE src ADDRESS`",
            rails.routes,
        ),
        Check(
            "rail-reach",
            "A connection is made from each rail to each rail of the other machine; to its counterpart on every port "
            "of CROSSRAIL_PORTS.",
            "error if a rail does not reach its counterpart, or not on all ports, with the reason: refused, no answer, "
            "nobody there",
            "`ip neigh show dev DEVICE`, `nft insert rule inet filter input iifname DEVICE tcp dport 18177-18199 "
            "accept`",
            rails.reachable,
        ),
        Check(
            "rail-data",
            "16 MiB are sent there and back over all rails, by workers on ports as programs have them, and compared.",
            "error if that fails, the data differs, or a rail has no part in it",
            "allow the ports of CROSSRAIL_PORTS in the firewalls; see docs/guides/p2p.md",
            rails.transfers,
        ),
        Check(
            "rail-mtu",
            "Datagrams that may not be fragmented are sent in both directions, to find the largest that arrive.",
            "error if the ends differ or large packets vanish, warning if another rail of its speed has a larger MTU, "
            "note if no datagram passes",
            "`ip link set DEVICE mtu N` at the end that is named, or at the switch",
            rails.packet_sizes,
        ),
        Check(
            "rail-speed",
            "Each rail carries data alone, for a second in each direction.",
            "error if it carries none, warning below half of the other rails' median (unless its link is slower by "
            "itself) "
            "and if one direction has less than half of the other's rate",
            "`ethtool DEVICE`, `tc qdisc show dev DEVICE`",
            rails.speeds,
        ),
        Check(
            "rail-shared",
            "All rails carry data at once, for a second in each direction.",
            "warning if that is less than 70 % of what they carry one by one",
            "other slots, more queues or processors; or fewer rails: `CROSSRAIL_NET_DEVICES`",
            rails.shared,
        ),
        Check(
            "rail-loss",
            "Segments sent again, and packets that interfaces dropped, while the rails carried data.",
            "warning above 2 % of the segments",
            "`ethtool -S DEVICE`, `ethtool -G DEVICE rx 4096`",
            rails.losses,
        ),
        Check(
            "peer-clock",
            "The difference between both machines' clocks, by the shortest of 16 round trips.",
            "warning above a second",
            "`systemctl enable --now chrony`",
            rails.clocks,
        ),
    ),
    *_of(
        "store",
        20,
        Check(
            "store",
            "A group of one is joined at the store, and a value is published, read and withdrawn.",
            "error if that fails, note if nothing listened and a store could be started there",
            "`crossrail store --listen HOST:PORT` on that machine",
            job.store,
        ),
    ),
    *_of(
        "nccl",
        50,
        Check(
            "nccl-plugin",
            "Two processes load the plugin as NCCL does, and move 1 MiB through it.",
            "error if that fails, note if the variables for NCCL are not set",
            '`eval "$(crossrail nccl-plugin)"`',
            job.plugin,
        ),
        Check(
            "nccl-library",
            "Which NCCL is installed, and which running processes have loaded one, with the plugin or without.",
            "warning if several are installed for this Python, note for a process without the plugin",
            "`pip uninstall` the one that PyTorch was not built for",
            job.libraries,
            limit_s=10,
        ),
    ),
    *_of(
        "fabric",
        90,
        Check(
            "fabric-library",
            "Which libfabric is loaded: version and file, and whether the process has several.",
            "error if there is none, warning for several, and for one that emulates remote writes on EFA",
            "`apt install libfabric1`, or `CROSSRAIL_FABRIC_LIBRARY=/opt/amazon/efa/lib`",
            fabric.library,
            limit_s=40,
        ),
        Check(
            "fabric-devices",
            "Every device of every provider with reliable datagrams: NIC, speed, link, GPU memory.",
            "warning without a link, and if none is usable; note if none is a NIC",
            "`fi_info`; `FI_PROVIDER`, `FI_PROVIDER_PATH`",
            fabric.devices,
            limit_s=40,
        ),
        Check(
            "fabric-limits",
            "The limits that each device states.",
            "ok",
            "none: they are kept",
            fabric.limits,
            limit_s=40,
        ),
        Check(
            "fabric-write",
            "Two endpoints of each device write to each other: bytes, immediates, latency and rate.",
            "error if that fails, the data differs, or an immediate loses bits",
            "`FI_LOG_LEVEL=warn crossrail doctor --fabric`",
            fabric.writes,
            limit_s=300,
        ),
        Check(
            "fabric-key",
            "A write by a key that was not given.",
            "error if it writes anything",
            "`CROSSRAIL_TLS=^fabric`",
            fabric.keys,
        ),
        Check(
            "fabric-fence",
            "A registration is closed while a write into it arrives, and the memory is watched.",
            "note if it is written further",
            "none: memory is returned once the peer has confirmed, or its lane has ended",
            fabric.fences,
        ),
        Check(
            "fabric-rows",
            "Rows of 64 bytes to 16 KiB, written one by one and packed.",
            "ok",
            "none: shorter rows are packed",
            fabric.rows,
        ),
        Check(
            "fabric-register",
            "256 MiB of host memory are registered, twice.",
            "note above 100 ms per GiB",
            "register pools once, before traffic",
            fabric.registration,
        ),
        Check(
            "fabric-gpu",
            "16 MiB of each GPU are written by the device, and read as soon as the immediate has arrived.",
            "error if that fails or bytes are not visible; note without HMEM",
            "`modprobe nvidia-peermem`; `CROSSRAIL_TLS=^fabric`",
            fabric.gpu_memory,
            limit_s=240,
        ),
    ),
    *_of(
        "launcher",
        10,
        Check(
            "launcher",
            "The variables that the launcher sets for each process, and whether they agree with each other.",
            "error if one is missing or cannot be, warning if two launchers have set theirs",
            "start the processes by `torchrun` or `srun`",
            job.variables,
        ),
    ),
)
"""Every check, in the order in which they run."""


def selected(only: Sequence[str] | None, asked: Set[str], *, gpus: bool) -> list[Check]:
    """The checks that ``only`` names, by id or group, or all of them.

    Those of an optional group run if it is in ``asked``, all of them unless ``only`` names some; those that need a GPU
    only if there are ``gpus``, or if they are named.
    """
    narrowed = {check.group for check in CHECKS if only is not None and not {check.id, check.group}.isdisjoint(only)}

    def runs(check: Check) -> bool:
        if check.group in OPTIONAL and (check.group not in asked or check.group not in narrowed):
            return check.group in asked
        if only is not None and check.id in only:
            return True
        return (only is None or check.group in only) and (gpus or check.id not in NEED_GPUS)

    return [check for check in CHECKS if runs(check)]
