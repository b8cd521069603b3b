"""The plain records that Crossrail returns, typed. GB is 1e9 bytes; times carry their unit in the name."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, TypedDict


class SupportsDLPack(Protocol):
    """An object that exports its memory through DLPack, as NumPy arrays and torch tensors do."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArrayInterface(Protocol):
    """An object that describes GPU memory by `__cuda_array_interface__`, as CuPy, Numba and PyTorch have it."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaStream(Protocol):
    """A CUDA stream by the protocol of `cuda.core` and CuPy: its version (0) and raw handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class HasCudaStream(Protocol):
    """A CUDA stream as PyTorch has it (`torch.cuda.Stream`): its raw handle."""

    @property
    def cuda_stream(self) -> int: ...


class HasDeviceName(Protocol):
    """A device of another library whose text is its name, as of `torch.device("cuda:1")`."""

    @property
    def index(self) -> int | None: ...


class LaneShare(TypedDict):
    """What one lane carried of one finished request."""

    name: str
    bytes: int
    chunks: int
    resent: int


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
    """One lane that was considered for an endpoint. `score_us_*`: the estimated time of a message that long."""

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


class TransportInfo(TypedDict):
    """One transport of this build: what it can do, or why it is unusable and what would help."""

    name: str
    usable: bool
    detail: str
    reason: str | None
    fix: str | None


class DeviceInfo(TypedDict):
    """One network device; `speed_mbps` and `numa_node` are None where the system does not say."""

    name: str
    interface: str
    address: str
    speed_mbps: int | None
    numa_node: int | None
    chosen: bool
    reason: str


class GpuInfo(TypedDict):
    """One GPU that was seen on the PCI bus."""

    pci: str
    model: str | None
    driver: str | None
    numa_node: int | None


class NicDistance(TypedDict):
    """How far a network device is from a GPU: `same switch`, `same root`, `same NUMA node`, `across` or `unknown`."""

    name: str
    distance: str


class CopiedRecord(TypedDict):
    """Number of copies between a GPU and memory of peers on this machine, by what made them: copy engines."""

    by_engine: int


class CudaDevice(TypedDict):
    """One GPU as CUDA has it; bytes. `free` is known of GPUs that this process uses.

    `bounce_bytes` is pinned host memory that carries chunks from and to it.
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
    """What CUDA has here; without it `reason` and, where there is one, `fix`.

    `peer_access[a][b]`: whether GPU `a` reaches the memory of GPU `b` without the host. `compiler`: what compiles
    kernels; where there is a driver and it is None, `why_no_compiler` says why and what would help.
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


class NumaNode(TypedDict):
    """One NUMA node and its processors."""

    node: int
    cpus: list[int]


class MachineInfo(TypedDict):
    """The machine; memory in bytes, `cpu_quota` in processors."""

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


class SettingValue(TypedDict):
    """One setting with its present value (secrets are hidden)."""

    name: str
    value: str
    is_default: bool


class Info(TypedDict):
    """What `crossrail info` prints; `cpus` are the processors that this process may use."""

    machine: MachineInfo
    cpus: list[int]
    transports: list[TransportInfo]
    devices: list[DeviceInfo]
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


class Samples(TypedDict):
    """Raw samples of one measurement; the clock's own cost is stated, not subtracted.

    latency: half a round trip each, the mean of `batch` consecutive ones (the last sample may cover fewer).
    bandwidth: one window of `batch` messages each, from the first send to the small reply.
    The echo end has no samples.
    """

    size: int
    samples_us: list[float]
    batch: int
    clock_us: float
    bytes_per_sample: int


class TransferEnd(TypedDict):
    """One end's view of one p2p iteration."""

    us: float
    receipt: ReceiptRecord


class Transfer(TypedDict):
    """One p2p iteration as both ends saw it."""

    sender: TransferEnd
    receiver: TransferEnd


class Member(NamedTuple):
    """One process in a group. Members of equal `node` share memory; `process` is `host:pid`."""

    rank: int
    local_rank: int
    node: str
    process: str


class RankState(NamedTuple):
    """What is known of a rank: not come yet, there, ended without leaving (`why`, and when noticed), or left."""

    state: Literal["absent", "alive", "dead", "left"]
    why: str | None = None


class BufferParameters(TypedDict):
    """What an ExpertBuffer is made for, as its native half takes it."""

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


class OperationTiming(TypedDict):
    """Where the time of a dispatch or combine went: casting, copying and summing rows, waiting for other ranks."""

    cast_us: float
    copy_us: float
    sum_us: float
    wait_us: float
    total_us: float


class OperationBytes(TypedDict):
    """Bytes of rows and scales: of every selection, those that left the rank, those that left the node."""

    logical: int
    wire: int
    network: int


class EpPlan(TypedDict):
    """What a bench of dispatch and combine does: `cached` repeats the routing of the first dispatch."""

    mode: Literal["dispatch", "combine", "e2e"]
    layout: Literal["expert", "rank"]
    cached: bool
    iters: int
    warmup: int


class EpSamples(TypedDict):
    """One rank's raw samples of dispatch and combine, by iteration; `bytes` of all iterations together."""

    total_us: list[float]
    cast_us: list[float]
    copy_us: list[float]
    sum_us: list[float]
    wait_us: list[float]
    bytes: OperationBytes


class DeviceEpPlan(TypedDict):
    """What a bench of dispatch and combine in GPU memory does: `clock` is the GPU's, by events, or the host's."""

    mode: Literal["dispatch", "combine", "e2e"]
    clock: Literal["gpu", "host"]
    cached: bool
    iters: int
    warmup: int


class DeviceEpPlace(TypedDict):
    """Where such a bench's buffer is, and whether rows are given as fp8 (`cast_before`) or cast by the dispatch."""

    ordinal: int
    num_sms: int | None
    cast_before: bool


class DeviceEpSamples(TypedDict):
    """One rank's raw samples by iteration, and the bytes of one iteration."""

    samples_us: list[float]
    bytes: OperationBytes


class DeviceEpFacts(TypedDict):
    """What such a bench's buffer is, and how each rank is reached: `self`, `heap` or `network`."""

    heap_bytes: int
    num_sms: int
    links: list[str]


class RawTcpSamples(TypedDict):
    """What plain TCP sockets took for `bytes_per_sample` each; `ways`: the addresses, as `10.0.0.1 -> 10.0.0.2`."""

    samples_us: list[float]
    bytes_per_sample: int
    ways: list[str]


class MeshPlan(TypedDict):
    """What a bench of a mesh does: bytes of a message, iterations, messages under way to one rank, bytes and round
    trips of small messages, seconds that a rank waits for others that are measuring.
    """

    size: int
    iters: int
    warmup: int
    window: int
    small: int
    trips: int
    patience: float


class MeshPair(TypedDict):
    """One ordered pair of ranks, none other being at work: a message's receipt, windows, half round trips."""

    target: int
    receipt: ReceiptRecord
    rate: Samples
    latency: Samples


class MessageRecord(TypedDict):
    """When what happened to one message of an exchange of all with all; microseconds from the barrier."""

    target: int
    posted_us: float
    matched_us: float
    copied_us: float
    finished_us: float


class MeshSamples(TypedDict):
    """What one rank of a mesh measured: pairs that begin there, and all to all at once (us, and bytes it sent).

    `slowest` are the messages of the slowest exchange, `copied` counts all of them.
    """

    pairs: list[MeshPair]
    all_us: list[float]
    all_bytes: int
    slowest: list[MessageRecord]
    copied: CopiedRecord


class UnpackPlan(TypedDict):
    """What a bench of unpacking does: `source` is `pinned` or `device`, `modes` are some of kernel, d2d and host."""

    device: str
    size: int
    fragment: int
    source: str
    modes: list[str]
    iters: int
    warmup: int


class UnpackTimes(TypedDict):
    """Samples of one way to unpack: the whole, and what the GPU took of it (empty where the host is in between)."""

    samples_us: list[float]
    gpu_us: list[float]


class UnpackSamples(TypedDict):
    """A contiguous copy, and every way to unpack as many bytes from one list of `pieces` entries."""

    pieces: int
    contiguous: UnpackTimes
    modes: dict[str, UnpackTimes]
