"""Reads a cluster or a model from TOML or JSON. Every mistake is one line that names the file and the key."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from crossrail_tools.report.writing import read_bounded

from ..words import kind
from .shapes import BLOCK, COMBINE_ROWS, DISPATCH_ROWS, WEIGHT_BYTES, Cluster, Model, Network, PlanError

MOST_BYTES = 1 << 20
MOST = 1 << 20
"""The largest whole number in a file; nothing that is planned has more of anything."""
MOST_EXPERTS = 1 << 16
MOST_CHOICES = 1 << 10
"""The most experts that a token selects, and groups: their numbers of combinations are computed exactly."""
LARGEST = 1e12
"""The largest number in a file that is not whole."""


def contents(path: str, most_bytes: int) -> bytes:
    """What is in a file. Raises PlanError if it cannot be read, or is longer than ``most_bytes``."""
    try:
        return read_bounded(path, most_bytes)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None


def load(path: str) -> dict[str, Any]:
    """The table in a file: JSON if its name ends in `.json`, else TOML. Raises PlanError."""
    data = contents(path, MOST_BYTES)
    try:
        text = data.decode()
        table = json.loads(text) if path.endswith(".json") else _toml(path, text)
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path}: {error or 'nested too deeply'}") from None
    if not isinstance(table, dict):
        raise PlanError(f"{path}: {kind(table)}, not an object of keys")
    return table


def _toml(path: str, text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:
            raise PlanError(
                f"{path}: TOML needs Python 3.11 or the package tomli; write the same keys as JSON into a .json file"
            ) from None
    return tomllib.loads(text)


class Table:
    """A table of a file, whose keys are read one by one. Raises PlanError for keys that are not ``known``."""

    def __init__(self, file: str, data: Mapping[str, Any], known: Collection[str], inside: str = "") -> None:
        self.file = file
        self.data = data
        self.inside = f"{inside}." if inside else ""
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1) or [name for name in known if name.startswith(key)]
                meant = f" (did you mean {near[0]}?)" if near else ""
                raise self.error(key, f"unknown key{meant}; known: {', '.join(known)}")

    def error(self, key: str, text: str) -> PlanError:
        """What is wrong with ``key``, of which an error shows the beginning."""
        return PlanError(f"{self.file}: {self.inside}{key:.80}: {text}")

    def table(self, key: str, known: Collection[str]) -> Table | None:
        """The table under ``key``, or None."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"{kind(value)}, not a table")
        return Table(self.file, value, known, f"{self.inside}{key}")

    def required(self, key: str, known: Collection[str]) -> Table:
        """The table under ``key``, which must be there."""
        found = self.table(key, known)
        if found is None:
            raise self.error(key, "missing")
        return found

    def whole(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to ``most``."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"{_shown(value)} is not a whole number")
        if not 1 <= value <= most:
            raise self.error(key, f"{_shown(value)} is not in 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None, least: float | None = None) -> float:
        """A finite number: greater than 0, or at least ``least``."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, f"{_shown(value)} is not a number")
        if not value <= LARGEST or (value <= 0 if least is None else value < least):
            allowed = "greater than 0" if least is None else f"of at least {least:g}"
            raise self.error(key, f"{_shown(value)} is not a finite number {allowed}")
        return float(value)

    def choice(self, key: str, known: Collection[str], default: str) -> str:
        """One of ``known`` names."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.error(key, f"{_shown(value)} is not known; known: {', '.join(known)}")
        return value

    def text(self, key: str, default: str) -> str:
        """A text without line ends."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or not value.isprintable():
            raise self.error(key, f"{_shown(value)} is not a line of text")
        return value

    def _value(self, key: str, default: float | None) -> Any:
        value = self.data.get(key, default)
        if value is None:
            raise self.error(key, "missing")
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else kind(value)


def cluster_of(data: Mapping[str, Any], source: str) -> Cluster:
    """The cluster that a file describes. Raises PlanError."""
    top = Table(source, data, ("name", "nodes", "gpus_per_node", "gpu", "nvlink", "network", "operations"))
    gpu = top.required("gpu", ("memory_gb", "copy_gb_per_s"))
    nvlink = top.required("nvlink", ("gb_per_s",))
    operations = top.required("operations", ("dispatch_us", "combine_us", "pair_us"))
    cluster = Cluster(
        name=top.text("name", Path(source).stem),
        nodes=top.whole("nodes"),
        gpus_per_node=top.whole("gpus_per_node"),
        memory_gb=gpu.number("memory_gb"),
        copy_gb_per_s=gpu.number("copy_gb_per_s"),
        nvlink_gb_per_s=nvlink.number("gb_per_s"),
        dispatch_us=operations.number("dispatch_us", least=0),
        combine_us=operations.number("combine_us", least=0),
        pair_us=operations.number("pair_us", 0, least=0),
        network=_network(top),
        source=source,
    )
    if cluster.pair_us > cluster.dispatch_us + cluster.combine_us:
        raise operations.error("pair_us", f"{cluster.pair_us:g} is more than dispatch_us + combine_us")
    if cluster.nodes > 1 and cluster.network is None:
        raise top.error("network", f"missing, with nodes = {cluster.nodes}")
    return cluster


def _network(top: Table) -> Network | None:
    known = ("nics_per_node", "gb_per_s", "latency_us", "oversubscription", "leaf_nodes")
    table = top.table("network", known)
    if table is None:
        return None
    return Network(
        nics_per_node=table.whole("nics_per_node"),
        gb_per_s=table.number("gb_per_s"),
        latency_us=table.number("latency_us", 0, least=0),
        oversubscription=table.number("oversubscription", 1, least=1),
        leaf_nodes=table.whole("leaf_nodes") if "leaf_nodes" in table.data else None,
    )


_MODEL = (
    "name",
    "experts",
    "topk",
    "hidden",
    "layers",
    "groups",
    "topk_groups",
    "redundant_experts",
    "intermediate",
    "imbalance",
    "types",
    "decode",
    "prefill",
)


def model_of(data: Mapping[str, Any], source: str) -> Model:
    """The model that a file describes. Raises PlanError."""
    top = Table(source, data, _MODEL)
    types = top.table("types", ("dispatch", "combine", "weights")) or Table(source, {}, ())
    model = Model(
        name=top.text("name", Path(source).stem),
        experts=top.whole("experts", most=MOST_EXPERTS),
        topk=top.whole("topk", most=MOST_CHOICES),
        hidden=top.whole("hidden"),
        layers=top.whole("layers", 1),
        groups=top.whole("groups", 1, MOST_CHOICES),
        topk_groups=top.whole("topk_groups", 1, MOST_CHOICES),
        redundant_experts=_redundant(top),
        intermediate=top.whole("intermediate") if "intermediate" in data else None,
        imbalance=top.number("imbalance", 1, least=1),
        dispatch=types.choice("dispatch", DISPATCH_ROWS, "fp8"),
        combine=types.choice("combine", COMBINE_ROWS, "bf16"),
        weights=types.choice("weights", WEIGHT_BYTES, "fp8"),
        decode_tokens=_tokens(top, "decode"),
        prefill_tokens=_tokens(top, "prefill"),
        source=source,
    )
    _check(top, model)
    return model


def _tokens(top: Table, phase: str) -> int | None:
    table = top.table(phase, ("tokens",))
    return None if table is None else table.whole("tokens")


def _redundant(top: Table) -> int | None:
    value = top.data.get("redundant_experts", 0)
    if value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
        raise top.error("redundant_experts", f'{_shown(value)} is neither a whole number from 0 nor "auto"')
    return value


def _check(top: Table, model: Model) -> None:
    """Refuses what is valid key by key but impossible together."""
    if model.topk > model.experts:
        raise top.error("topk", f"{model.topk} is more than experts = {model.experts}")
    if model.experts % model.groups:
        raise top.error("groups", f"experts = {model.experts} do not divide into {model.groups} groups")
    if model.topk_groups > model.groups:
        raise top.error("topk_groups", f"{model.topk_groups} is more than groups = {model.groups}")
    usable = model.topk_groups * model.experts // model.groups
    if model.topk > usable:
        raise top.error("topk", f"{model.topk} is more than the {usable} experts of topk_groups = {model.topk_groups}")
    scaled = {model.dispatch, model.combine} - {"bf16"}
    if scaled and model.hidden % BLOCK:
        names = " and ".join(sorted(scaled))
        raise top.error("hidden", f"{model.hidden} is not a multiple of {BLOCK}, as {names} rows need")
    if model.decode_tokens is None and model.prefill_tokens is None:
        raise top.error("decode", "missing, and so is prefill; give the tokens of each rank in at least one of them")
