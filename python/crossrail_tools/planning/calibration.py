"""Rates and latencies of a machine, fitted to what was measured there, and how far a plan is from measurements.

Dispatch and combine in GPU memory give five numbers at once: an operation without rows (two), what a combine right
after its dispatch saves, the rate of NVLink, and the rate at which rows are read and written at the experts. They are
those with the least sum of squared relative errors over all rows, none of them negative.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crossrail_tools.report.schema import Report, Row, SchemaError
from crossrail_tools.report.units import counted

from .cost import Planned, plan
from .reading import MOST, MOST_CHOICES, MOST_EXPERTS
from .shapes import Cluster, Model, Phase, PlanError

OPERATIONS = ("dispatch", "combine", "e2e")
TERMS = ("dispatch_us", "combine_us", "pair_us", "nvlink", "copy")
LEAST_SIZES = 3
"""Different numbers of bytes that a fit needs of each operation."""

_LIMIT = 1e6
"""Rates above this, in GB/s, mean that the time does not depend on the bytes."""


@dataclass(frozen=True)
class Measured:
    """A row of dispatch, combine or both that can be planned, and the file it is from."""

    row: Row
    file: str

    @property
    def us(self) -> float:
        """The median of all samples."""
        return float(self.row.p50_us or 0.0)

    def planned(self, cluster: Cluster) -> Planned:
        """The plan of the same exchange on GPUs of ``cluster`` that one node holds."""
        return plan(one_node(cluster, self.ranks), model_of_row(self.row, self.file), self.phase, self.ranks)

    @property
    def phase(self) -> Phase:
        """The phase whose layout the row has."""
        return "decode" if self.row.layout == "expert" else "prefill"

    @property
    def ranks(self) -> int:
        """Ranks that took part."""
        return int(self.row.ranks or 1)


@dataclass(frozen=True)
class Compared:
    """A measured row beside its plan. ``fitted``: its file was also used for the calibration."""

    measured: Measured
    us: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the plan."""
        return self.us / self.measured.us - 1


@dataclass(frozen=True)
class Files:
    """Measured files: rows that can be planned, all others by the reason why not, and rows of links."""

    exchanges: list[Measured]
    left_out: dict[str, int]
    links: list[Row]


def read(paths: Sequence[str], texts: Iterable[str]) -> Files:
    """Reads reports. Raises PlanError for a file of another kind."""
    exchanges: list[Measured] = []
    left_out: Counter[str] = Counter()
    links: list[Row] = []
    for path, text in zip(paths, texts, strict=True):
        try:
            report = Report.loads(text)
        except SchemaError as error:
            raise PlanError(f"{path}: {error}; give the JSON of `crossrail bench`") from None
        widest = max((row.num_sms or 0 for row in report.rows), default=0)
        for row in report.rows:
            if row.what not in OPERATIONS:
                links.append(row)
                continue
            why = _outside(row, widest)
            if why is None:
                exchanges.append(Measured(row, path))
            else:
                left_out[why] += 1
    return Files(exchanges, dict(left_out), links)


def _outside(row: Row, widest: int) -> str | None:
    """Why the model of cost does not cover ``row``; None if it does."""
    if not _complete(row):
        return "without the numbers that a plan needs"
    if row.device is None or not row.device.startswith("cuda"):
        return "in host memory"
    if (row.nodes or 1) > 1 or row.bytes_network:
        return "over a network"
    if row.routing != "uniform":
        return f"routed otherwise than uniformly ({row.routing})"
    if row.cached:
        return "with a cached handle"
    if (row.num_sms or 0) < widest:
        return "with fewer multiprocessors than others of their file"
    return None


def _complete(row: Row) -> bool:
    """Whether ``row`` has a time, and a shape that can be."""
    ranks, tokens, hidden = row.ranks or 0, row.tokens or 0, row.hidden or 0
    topk, experts = row.topk or 0, row.experts or 0
    return (
        (row.p50_us or 0) > 0
        and 0 < tokens <= MOST
        and 0 < hidden <= MOST
        and 0 < topk <= min(experts, MOST_CHOICES)
        and 0 < ranks <= experts <= MOST_EXPERTS
        and experts % ranks == 0
        and row.layout in ("expert", "rank")
        and row.dtype in ("fp8", "bf16")
    )


def model_of_row(row: Row, source: str) -> Model:
    """The model that a measured row is about."""
    decode = row.layout == "expert"
    return Model(
        name=source,
        experts=int(row.experts or 0),
        topk=int(row.topk or 0),
        hidden=int(row.hidden or 0),
        dispatch=str(row.dtype),
        decode_tokens=row.tokens if decode else None,
        prefill_tokens=None if decode else row.tokens,
        source=source,
    )


def one_node(cluster: Cluster, gpus: int) -> Cluster:
    """One node of ``cluster`` with ``gpus`` GPUs."""
    return dataclasses.replace(cluster, nodes=1, gpus_per_node=gpus, network=None)


def calibrated(cluster: Cluster, files: Files) -> tuple[Cluster, list[str]]:
    """``cluster`` with everything that ``files`` tell about it, and what was taken from them, as sentences.

    Raises PlanError if they tell nothing, or too little for a fit.
    """
    told: list[str] = []
    if files.exchanges:
        cluster = _from_exchanges(cluster, files.exchanges)
        told.append(
            f"dispatch {cluster.dispatch_us:.1f} us, combine {cluster.combine_us:.1f} us, both "
            f"{cluster.pair_us:.1f} us less, NVLink {cluster.nvlink_gb_per_s:.0f} GB/s, rows at the experts "
            f"{cluster.copy_gb_per_s:.0f} GB/s: fitted to {len(files.exchanges)} rows of dispatch and combine"
        )
    else:
        rates = [row.gb_per_s for row in files.links if row.what == "mesh" and row.part == "all" and row.gb_per_s]
        if rates and all(row.transport == "cuda_ipc" for row in files.links if row.part == "all"):
            cluster = dataclasses.replace(cluster, nvlink_gb_per_s=float(np.median(rates)))
            told.append(f"NVLink {cluster.nvlink_gb_per_s:.0f} GB/s: all GPUs to all others, copies by bench mesh")
    line = _network_line(files.links)
    if line is not None and cluster.network is not None:
        latency, rate, rails = line
        network = dataclasses.replace(cluster.network, latency_us=latency, gb_per_s=rate)
        cluster = dataclasses.replace(cluster, network=network)
        told.append(f"network {rate:.2f} GB/s for each NIC and {latency:.1f} us: fitted to TCP over {rails}")
    if not told:
        raise PlanError(
            "--calibrate: the files have no rows of dispatch and combine in GPU memory, of a mesh of GPUs, or of TCP "
            "at two sizes (bench latency, bench p2p); measure with `crossrail bench ep --device cuda --json FILE`"
        )
    return cluster, told


def _from_exchanges(cluster: Cluster, rows: Sequence[Measured]) -> Cluster:
    for operation in ("dispatch", "combine"):
        sizes = {one.row.bytes_logical for one in rows if one.row.what == operation}
        if len(sizes) < LEAST_SIZES:
            raise PlanError(
                f"--calibrate: {operation} was measured with {len(sizes)} different numbers of bytes, and a fit needs "
                f"{LEAST_SIZES}; measure several --tokens, as in benches/results/gpu/ep_sweep-2.json"
            )
    measured = np.array([one.us for one in rows])
    terms = np.array([_terms(one, cluster) for one in rows]) / measured[:, None]
    found = least_squares(terms, np.ones(len(rows)))
    dispatch, combine, pair, nvlink, copy = (float(value) for value in found)
    return dataclasses.replace(
        cluster,
        dispatch_us=dispatch,
        combine_us=combine,
        pair_us=min(pair, dispatch + combine),
        nvlink_gb_per_s=1 / max(nvlink, 1 / _LIMIT),
        copy_gb_per_s=1 / max(copy, 1 / _LIMIT),
    )


def _terms(one: Measured, cluster: Cluster) -> list[float]:
    """Coefficients of `TERMS` in the time of ``one``: 1, 0 or -1 for latencies, bytes/1000 for rates."""
    planned = one.planned(cluster)
    parts = {"dispatch": [planned.dispatch], "combine": [planned.combine]}.get(
        one.row.what, [planned.dispatch, planned.combine]
    )
    both = len(parts) == 2
    return [
        float(both or one.row.what == "dispatch"),
        float(both or one.row.what == "combine"),
        -float(both),
        sum(part.nvlink_bytes for part in parts) / 1e3,
        sum(part.local_bytes for part in parts) / 1e3,
    ]


def least_squares(terms: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-negative coefficients with the least squares: the most negative one is fixed at 0 until none is left."""
    kept = list(range(terms.shape[1]))
    scale = np.linalg.norm(terms, axis=0)
    scale[scale == 0] = 1
    found = np.zeros(terms.shape[1])
    while kept:
        solved = np.linalg.lstsq(terms[:, kept] / scale[kept], values, rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved / scale[kept]
            break
        kept.pop(int(np.argmin(solved)))
    return found


def _network_line(rows: Sequence[Row]) -> tuple[float, float, str] | None:
    """Latency (us), rate of one rail (GB/s) and rails of TCP; None without rows of different sizes."""
    short: list[tuple[int, float]] = []
    long: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if row.transport != "tcp" or not row.p50_us or row.device is not None:
            continue
        if row.what == "latency":
            short.append((row.size, row.p50_us))
        elif row.what == "p2p":
            long.setdefault(max(sum(lane.bytes > 0 for lane in row.lanes), 1), []).append((row.size, row.p50_us))
    for rails in sorted(long, reverse=True):
        points = short + long[rails]
        if len({size for size, _ in points}) < 2:
            continue
        us = np.array([us for _, us in points])
        terms = np.array([[1.0, size / 1e3] for size, _ in points]) / us[:, None]
        latency, slope = least_squares(terms, np.ones(len(us)))
        if slope > 1 / _LIMIT:
            return float(latency), float(1 / slope) / rails, counted(rails, "rail")
    return None


def compared(cluster: Cluster, rows: Sequence[Measured], fitted: Sequence[str] = ()) -> list[Compared]:
    """Every row beside its plan; ``fitted`` are the files of the calibration."""
    result = []
    for one in rows:
        planned = one.planned(cluster)
        us = {"dispatch": planned.dispatch.us, "combine": planned.combine.us}.get(one.row.what, planned.layer_us)
        result.append(Compared(one, us, one.file in fitted))
    return result
