"""The table of checks: what is tested, when it is how severe, and what mends it. `docs/doctor.md` is made from it."""

from __future__ import annotations

from collections.abc import Sequence, Set

from . import gpus as gpu_checks
from . import job, limits, nics, transports
from .finding import Check

GROUPS = {
    "settings": "the CROSSRAIL_ variables of this shell",
    "transports": "each transport, by moving data between two processes",
    "limits": "what this process may use: memory, processors, descriptors, system calls, the clock",
    "gpus": "GPUs, by moving data",
    "network": "the network devices that carry data",
    "store": "the store of a job (`--store`)",
    "nccl": "Crossrail as NCCL's network (`--nccl`)",
    "launcher": "the variables of a launcher (`--torchrun`, `--slurm`)",
}
"""The groups of checks, in the order in which they run. Those with an option run only when it is given."""

OPTIONAL = ("store", "nccl", "launcher")

NEED_GPUS = frozenset({"gpu-kernel", "gpu-pinned", "gpu-export", "gpu-ipc", "gpu-pairs", "nic-distance"})

CHECKS = (
    Check(
        "settings",
        "settings",
        "A context and a worker are made with the settings of the environment.",
        "error for each setting that is refused; the other checks run without it",
        "`unset NAME`, or a value that `crossrail info` lists",
        10,
        limits.settings,
    ),
    Check(
        "shm",
        "transports",
        "Two processes send 16 MiB to each other over shared memory, and compare it.",
        "error if it fails or the data differs",
        "allow memfd_create and Unix sockets: `docker run --security-opt seccomp=unconfined`",
        15,
        transports.shared_memory,
    ),
    Check(
        "cma",
        "transports",
        "Two processes read and write each other's memory (cross-memory attach).",
        "warning if the kernel refuses: large messages then take two copies",
        "`sysctl -w kernel.yama.ptrace_scope=0`, or `docker run --cap-add=SYS_PTRACE`",
        15,
        transports.single_copy,
    ),
    Check(
        "mapped",
        "transports",
        "One process maps 16 MiB of `Context.alloc` of another, and compares it.",
        "error if it fails or the data differs",
        "as for `shm`",
        15,
        transports.mapped_memory,
    ),
    Check(
        "fd-passing",
        "transports",
        "A memfd is passed over a Unix socket and written by both ends; then pidfd_getfd is tried.",
        "error if the descriptor or the data does not arrive, note if only pidfd_getfd is refused",
        "`docker run --cap-add=SYS_PTRACE`",
        15,
        transports.passed_descriptors,
    ),
    Check(
        "tcp-loopback",
        "transports",
        "Two processes send 16 MiB to each other over TCP on this machine.",
        "error if it fails or the data differs",
        "`ip link set lo up`",
        15,
        transports.loopback_tcp,
    ),
    Check(
        "registration",
        "transports",
        "Regions of 1, 4 and 16 GiB, as far as half of the free memory goes, are registered and written to their end.",
        "error if one is refused, note if too little memory is free",
        "`ulimit -l unlimited`, or register in smaller pieces",
        20,
        transports.registration,
    ),
    Check(
        "descriptors",
        "limits",
        f"{limits.ENOUGH_DESCRIPTORS} descriptors are opened.",
        "warning if that fails",
        f"`ulimit -n {limits.ENOUGH_DESCRIPTORS}`",
        5,
        limits.descriptors,
    ),
    Check(
        "memlock",
        "limits",
        "64 MiB are locked.",
        "warning if that fails and the machine has RDMA devices, else note",
        "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`",
        5,
        limits.locked_memory,
    ),
    Check(
        "processors",
        "limits",
        "The processors that affinity and the control groups leave, and how often the quota ran out.",
        "warning below two processors, and if the control group was throttled",
        "`docker run --cpus 4`, `srun --cpus-per-task 4`",
        5,
        limits.processors,
    ),
    Check(
        "memory",
        "limits",
        "The memory that is free within the limits of the control groups, and processes killed for want of it.",
        "warning below 1 GiB, note if the out-of-memory killer was at work",
        "`docker run --memory`, `srun --mem`",
        5,
        limits.memory,
    ),
    Check(
        "dev-shm",
        "limits",
        "A file is made in /dev/shm. Crossrail needs none; NCCL, MPI and PyTorch do.",
        "note if that fails, or if less than 1 GiB is free",
        "`docker run --ipc=host`, or `--shm-size=8g`",
        5,
        limits.shared_memory_folder,
    ),
    Check(
        "system-calls",
        "limits",
        "System calls that containers often forbid are made: memfd_create, process_vm_readv, pidfd_open and others.",
        "error if shared memory needs it, else note",
        "`docker run --security-opt seccomp=unconfined`",
        5,
        limits.system_calls,
    ),
    Check(
        "huge-pages",
        "limits",
        "Whether the kernel backs large buffers with huge pages.",
        "note if they are off",
        "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        5,
        limits.huge_pages,
    ),
    Check(
        "pci-access",
        "limits",
        "Whether ACS of the PCI bridges, or the IOMMU, sends traffic between devices through the host.",
        "warning if a bridge redirects and there are GPUs, note if the IOMMU translates or only root can read it",
        "`setpci -s BRIDGE ECAP_ACS+6.w=0000`; `iommu=pt` on the kernel's command line",
        10,
        limits.direct_access,
    ),
    Check(
        "clock",
        "limits",
        "The clock is read many times, and the kernel is asked whether it is synchronized.",
        "warning if reading it is slow, note if it is not synchronized",
        "`systemctl enable --now chrony`",
        5,
        limits.clock,
    ),
    Check(
        "gpu-driver",
        "gpus",
        "The CUDA driver is loaded, and its GPUs are compared with those on the PCI bus.",
        "error if there are GPUs that CUDA cannot use, note if there is none or CUDA offers fewer",
        "install NVIDIA's driver; `docker run --gpus all`",
        20,
        gpu_checks.driver,
    ),
    Check(
        "gpu-kernel",
        "gpus",
        "On each GPU a kernel is compiled by NVRTC and scatters 16 MiB.",
        "error if it fails",
        "`pip install nvidia-cuda-nvrtc`, or `CROSSRAIL_UNPACK=d2d`",
        60,
        gpu_checks.kernels,
    ),
    Check(
        "gpu-pinned",
        "gpus",
        "16 MiB are copied from pinned host memory to each GPU.",
        "error if it fails",
        "`ulimit -l unlimited`",
        30,
        gpu_checks.pinned_memory,
    ),
    Check(
        "gpu-export",
        "gpus",
        "Memory of `Context.alloc` on each GPU is exported as a descriptor, and another process copies into it.",
        "error if it fails, warning if the copy is staged in host memory",
        "`docker run --ipc=host` for both containers",
        60,
        gpu_checks.exported_memory,
    ),
    Check(
        "gpu-ipc",
        "gpus",
        "The same with memory of cudaMalloc, as PyTorch allocates it, by its IPC handle.",
        "as for `gpu-export`",
        "`docker run --ipc=host --pid=host` for both containers",
        60,
        gpu_checks.legacy_handles,
    ),
    Check(
        "gpu-pairs",
        "gpus",
        "64 MiB are copied between each two GPUs by two processes, in both directions, and timed.",
        "warning without peer access, and for a pair below half of the median rate",
        "`nvidia-smi topo -m`, `systemctl restart nvidia-fabricmanager`",
        240,
        gpu_checks.pairs,
    ),
    Check(
        "nic-link",
        "network",
        "Every network device with an address, also those that are down.",
        "warning if one is down or has no link",
        "`ip link set DEVICE up`",
        5,
        nics.link_state,
    ),
    Check(
        "nic-speed",
        "network",
        "The speeds that the devices have negotiated.",
        "note if they differ",
        "`ethtool DEVICE`; `CROSSRAIL_NET_DEVICES=^DEVICE`",
        5,
        nics.speeds,
    ),
    Check(
        "nic-mtu",
        "network",
        "The MTU of each device.",
        "warning if one is smaller than usual, note below 9000 from 25 Gbit/s on",
        "`ip link set DEVICE mtu 9000`, on both ends and the switch",
        5,
        nics.mtus,
    ),
    Check(
        "nic-address",
        "network",
        "Whether devices share a subnet, and by which of them the kernel then sends.",
        "warning if they do and all send by one",
        "`ip rule add from ADDRESS table N`, with a route in that table",
        5,
        nics.addresses,
    ),
    Check(
        "nic-route",
        "network",
        "The kernel is asked by which device it sends to the subnet of each device.",
        "warning if by another one, or not at all",
        "`ip route del ENTRY`, `ip route replace SUBNET dev DEVICE src ADDRESS`",
        5,
        nics.routes,
    ),
    Check(
        "nic-filter",
        "network",
        "Reverse-path filters of devices that share a subnet.",
        "warning if they are strict",
        "`sysctl -w net.ipv4.conf.DEVICE.rp_filter=2`",
        5,
        nics.filters,
    ),
    Check(
        "nic-queues",
        "network",
        "Receive queues of physical devices, and the processors of their interrupts.",
        "warning if all interrupts are on one processor, or on another NUMA node; note for one queue",
        "`ethtool -L DEVICE combined 4`, `systemctl start irqbalance`",
        5,
        nics.queues,
    ),
    Check(
        "nic-distance",
        "network",
        "The distance of each GPU to the nearest network device.",
        "note if all are across the NUMA boundary, or the distance is unknown",
        "`CROSSRAIL_NET_DEVICES=near`",
        5,
        nics.distances,
    ),
    Check(
        "nic-load",
        "network",
        "One process sends to another over TCP for a second; segments sent again and packets lost are counted.",
        "warning above 1 % of segments, and for any packet lost",
        "`sysctl -w net.core.netdev_max_backlog=65536`",
        20,
        transports.under_load,
    ),
    Check(
        "socket-buffers",
        "network",
        "The largest windows of TCP's autotuning, and what a socket gets that asks for 4 MiB.",
        "warning below 4 MiB with a device of 10 Gbit/s or more, else note",
        "`sysctl -w net.ipv4.tcp_wmem='4096 131072 16777216'`",
        5,
        limits.socket_buffers,
    ),
    Check(
        "congestion",
        "network",
        "The congestion control that a new socket has.",
        "note for one that is slow on fast links",
        "`sysctl -w net.ipv4.tcp_congestion_control=cubic`",
        5,
        limits.congestion_control,
    ),
    Check(
        "store",
        "store",
        "A group of one is joined at the store, and a value is published, read and withdrawn.",
        "error if that fails, note if nothing listened and a store could be started there",
        "`crossrail store --listen HOST:PORT` on that machine",
        20,
        job.store,
    ),
    Check(
        "nccl-plugin",
        "nccl",
        "Two processes load the plugin as NCCL does, and move 1 MiB through it.",
        "error if that fails, note if the variables for NCCL are not set",
        '`eval "$(crossrail nccl-plugin)"`',
        30,
        job.plugin,
    ),
    Check(
        "nccl-library",
        "nccl",
        "Which NCCL is installed, and which running processes have loaded one, with the plugin or without.",
        "warning if several are installed for this Python, note for a process without the plugin",
        "`pip uninstall` the one that PyTorch was not built for",
        10,
        job.libraries,
    ),
    Check(
        "launcher",
        "launcher",
        "The variables that the launcher sets for each process, and whether they agree with each other.",
        "error if one is missing or cannot be, warning if two launchers have set theirs",
        "start the processes by `torchrun` or `srun`",
        10,
        job.variables,
    ),
)
"""Every check, in the order in which they run."""


def selected(only: Sequence[str] | None, asked: Set[str], *, gpus: bool) -> list[Check]:
    """The checks that ``only`` names, by id or group, or all of them.

    Those of an optional group run only if it is in ``asked``; those that need a GPU only if there are ``gpus``, or if
    they are named.
    """

    def runs(check: Check) -> bool:
        if check.group in OPTIONAL:
            return check.group in asked
        if only is not None and check.id in only:
            return True
        return (only is None or check.group in only) and (gpus or check.id not in NEED_GPUS)

    return [check for check in CHECKS if runs(check)]
