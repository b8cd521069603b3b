"""Types of the plain records that Crossrail returns. GB is 1e9 bytes; names of times end in their unit."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, TypedDict


class SupportsDLPack(Protocol):
    """An object that exports its memory through DLPack, as NumPy arrays and torch tensors do."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArrayInterface(Protocol):
    """An object that exports GPU memory by `__cuda_array_interface__`, as CuPy, Numba and PyTorch arrays do."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaStream(Protocol):
    """A CUDA stream that follows the protocol of `cuda.core` and CuPy: protocol version (0) and raw handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class HasCudaStream(Protocol):
    """A CUDA stream with its raw handle as an attribute, such as `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int: ...


class HasDeviceName(Protocol):
    """A device of another library whose text is its name, such as `torch.device("cuda:1")`."""

    @property
    def index(self) -> int | None: ...


class LaneShare(TypedDict):
    """The share of one lane in a finished request. ``resent``: of its bytes, those resent for a lost or slow lane."""

    name: str
    bytes: int
    chunks: int
    resent: int


class MoveExplain(TypedDict):
    """The path of a move: lane, mechanism (``how``), and ``why``; ``runs``: rows after adjacent ones are merged."""

    lane: str
    how: str
    why: str
    rows: int
    runs: int
    nbytes: int


class HeldTimes(TypedDict):
    """Idle time of a transfer's connections caused by staging at one end, in microseconds.

    `pack_us`: the next chunk was still being copied out of GPU memory. `unpack_us`: no chunk could be received, or all
    had been, while chunks were being copied into GPU memory. `slot_us`: a chunk waited for bounce memory for another
    reason. A wait of some connections counts in proportion to their number."""

    pack_us: float
    unpack_us: float
    slot_us: float


class ReceiptRecord(TypedDict):
    """A receipt as plain data (`Receipt.as_dict()`), for JSON."""

    bytes: int
    tag: int
    peer: str
    protocol: str
    lanes: list[LaneShare]
    match_us: float
    window_us: float
    wire_us: float
    copy_us: float
    pushed: bool
    pack_us: float
    unpack_us: float
    slot_us: float
    held: HeldTimes
    notes: list[str]


class LaneReport(TypedDict):
    """The running totals of one lane of an endpoint, frame heads included.

    `device` is empty for lanes without one (shared memory); `retransmits` are TCP segments.
    """

    name: str
    transport: str
    device: str
    alive: bool
    tx_bytes: int
    rx_bytes: int
    retransmits: int


class Candidate(TypedDict):
    """One lane considered for an endpoint.

    `score_us_*` are the estimated times of messages of 8 B, 1 MiB and 64 MiB; `reason` says why it was not chosen.
    `missed`: it was expected to carry data and does not, as a rail without a counterpart.
    """

    lane: str
    transport: str
    device: str | None
    chosen_for: list[str]
    latency_us: float
    gb_per_s: float
    score_us_8b: float | None
    score_us_1m: float | None
    score_us_64m: float | None
    reason: str | None
    missed: bool


class TransportInfo(TypedDict):
    """One transport of this build: its capabilities, or the reason why it is unusable and the fix."""

    name: str
    usable: bool
    detail: str
    reason: str | None
    fix: str | None


class DeviceInfo(TypedDict):
    """One network device; `speed_mbps` and `numa_node` are None if the system does not expose them."""

    name: str
    interface: str
    address: str
    speed_mbps: int | None
    numa_node: int | None
    chosen: bool
    reason: str


class Placement(TypedDict):
    """Where threads that serve a network device or a GPU run.

    `near_devices`: on the processors of the device's NUMA node, of those that this process may use (`nodes`); else
    wherever the scheduler puts them, and `why_not` says why.
    """

    near_devices: bool
    why_not: str | None
    nodes: list[NumaNode]


class TcpWay(TypedDict):
    """One of the kernel's ways to send or receive over TCP, beside send and recv, which always work.

    `reason`: what it is used for, why it is not used, or what this process lacks; `fix`: what to change then.
    """

    name: str
    possible: bool
    used: bool
    reason: str
    fix: str | None


class GpuInfo(TypedDict):
    """One GPU on the PCI bus."""

    pci: str
    model: str | None
    driver: str | None
    numa_node: int | None


class NicDistance(TypedDict):
    """Distance of a network device to a GPU: `same switch`, `same root`, `same NUMA node`, `across` or `unknown`."""

    name: str
    distance: str


class CopiedRecord(TypedDict):
    """Number of copies between a GPU and memory of peers on this machine, by what made them: copy engines."""

    by_engine: int


class CudaDevice(TypedDict):
    """One GPU as CUDA reports it; memory in bytes. `free` is known for GPUs that this process uses.

    `bounce_bytes` is pinned host memory that stages chunks from and to it.
    """

    ordinal: int
    name: str
    arch: str
    memory: int
    free: int | None
    pci: str
    numa_node: int | None
    bounce_bytes: int
    copied: CopiedRecord
    nics: list[NicDistance]


class KernelCache(TypedDict):
    """Compiled kernels on disk."""

    folder: str
    bytes: int


class CudaState(TypedDict):
    """The state of CUDA on this machine; if it is unusable, the `reason` and, if there is one, the `fix`.

    `peer_access[a][b]`: whether GPU `a` can access the memory of GPU `b` directly. `compiler`: the kernel compiler; if
    there is a driver but no compiler, `why_no_compiler` has the reason and the fix.
    """

    present: bool
    reason: str | None
    fix: str | None
    driver: str | None
    devices: list[CudaDevice]
    peer_access: list[list[bool]]
    kernel_cache: KernelCache | None
    compiler: str | None
    why_no_compiler: str | None


class FabricDevice(TypedDict):
    """One provider of libfabric over one device. Sizes are in bytes, `speed` in bit/s (0: not known).

    `modes`: what registrations need. `gpu`: memory of GPUs can be registered. `rx_cq_data`: an immediate consumes a
    receive. `up` is None if the provider does not know the link.
    """

    provider: str
    name: str
    nic: str | None
    pci: str | None
    speed: int
    up: bool | None
    gpu: bool
    modes: str
    mr_key_size: int
    cq_data_size: int
    tx_size: int
    inject_size: int
    iov_limit: int
    rma_iov_limit: int
    max_msg_size: int
    rx_cq_data: bool


class FabricState(TypedDict):
    """libfabric as this process has loaded it: `version` is None if it cannot be used, for `reason`.

    `refused`: why there is no device.
    """

    version: str | None
    reason: str | None
    fix: str | None
    files: list[str]
    refused: str | None
    devices: list[FabricDevice]


class NumaNode(TypedDict):
    """One NUMA node and its processors."""

    node: int
    cpus: list[int]


class HostMemory(TypedDict):
    """The memory that this process may use, in bytes.

    `limited_by`: the file with the limit (`limit`) of the control group that determines `available`; None if the
    machine does. `oom_kills`: processes of the group that the kernel's out-of-memory killer has ended so far.
    """

    available: int
    capacity: int
    limited_by: str | None
    limit: int | None
    oom_kills: int | None


class MachineInfo(TypedDict):
    """The machine; memory in bytes, `cpu_quota` in processors.

    `memory_available` is within the limits of this process's control groups.
    """

    hostname: str
    boot_id: str
    kernel: str
    page_size: int
    memory_total: int
    memory_available: int
    memory_limit: int | None
    processor: str | None
    cpu_quota: float | None
    numa_nodes: list[NumaNode]


class _SettingValue(TypedDict):
    name: str
    value: str
    is_default: bool


class SettingValue(_SettingValue, total=False):
    """One setting with its current value (secrets are hidden). ``error``: why `crossrail info` could not use it."""

    error: str


class Info(TypedDict):
    """The data of `crossrail info`; `cpus` are the processors that this process may use."""

    machine: MachineInfo
    cpus: list[int]
    transports: list[TransportInfo]
    devices: list[DeviceInfo]
    tcp_ways: list[TcpWay]
    placement: Placement
    gpus: list[GpuInfo]
    cuda: CudaState
    settings: list[SettingValue]


class SettingInfo(TypedDict):
    """One entry of the settings reference."""

    name: str
    field: str
    accepts: str
    default: str | None
    doc: str


class TransferEnd(TypedDict):
    """One p2p iteration as measured at one end."""

    us: float
    receipt: ReceiptRecord


class Transfer(TypedDict):
    """One p2p iteration as measured at both ends."""

    sender: TransferEnd
    receiver: TransferEnd


class Member(NamedTuple):
    """One process in a group. Members with the same `node` share memory; `process` is `host:pid`."""

    rank: int
    local_rank: int
    node: str
    process: str


class RankState(NamedTuple):
    """The state of a rank: not joined yet, alive, dead without having left (`why`, and when noticed), or left."""

    state: Literal["absent", "alive", "dead", "left"]
    why: str | None = None


class BufferParameters(TypedDict):
    """The parameters of a native expert buffer."""

    ranks: int
    max_tokens: int
    hidden: int
    experts: int
    topk: int
    dispatch_dtype: str
    scale: str
    layouts: list[str]
    prereduce: bool
    share_node: bool
    timeout: float
    on_loss: str


class OperationTiming(TypedDict):
    """Breakdown of the time of a dispatch or combine: casting, copying and summing rows, waiting for other ranks."""

    cast_us: float
    copy_us: float
    sum_us: float
    wait_us: float
    total_us: float


class OperationBytes(TypedDict):
    """Bytes of rows and scales: of every selection, that left the rank, and that left the node."""

    logical: int
    wire: int
    network: int


class DeviceEpPlace(TypedDict):
    """The GPU of such a measurement, whether dispatch is given fp8 rows (`cast_before`), and `send`."""

    ordinal: int
    num_sms: int | None
    cast_before: bool
    send: str


class DeviceEpFacts(TypedDict):
    """The buffer of such a measurement, the link to each rank (`self`, `heap`, `network`), bytes by rail, `send`."""

    heap_bytes: int
    num_sms: int
    links: list[str]
    rails: dict[str, int]
    send: str
