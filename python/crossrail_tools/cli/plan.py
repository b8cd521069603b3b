"""`crossrail plan`: bytes, times and memory of expert parallelism on a cluster, before one has it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json as encoder
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from crossrail_tools.planning.calibration import Compared, Files, calibrated, compared, read
from crossrail_tools.planning.cost import Planned, plan
from crossrail_tools.planning.presets import CLUSTERS, MODELS, PUBLISHED, Published
from crossrail_tools.planning.reading import cluster_of, contents, load, model_of
from crossrail_tools.planning.shapes import PHASES, SENDS, Cluster, Model, Phase, PlanError, Send, plain
from crossrail_tools.planning.tables import TOLERANCE, assumptions, band, check_tables, plan_tables, published_tables
from crossrail_tools.report.tables import console
from crossrail_tools.report.writing import write_text

from .failure import Failure, UsageFailure
from .options import fields_of
from .parsing import Command, Parser, destination
from .reporting import check_json

SCHEMA = "crossrail-plan/1"
SIZES = tuple(4 << shift for shift in range(10))
"""Sizes that are planned unless some are named: EP4 to EP2048."""

MOST_RANKS = 1 << 16
MOST_BYTES = 1 << 28
"""Larger files are not measurements of ours."""

Known = TypeVar("Known", Cluster, Model)


@dataclass(frozen=True)
class PlanOptions:
    """`crossrail plan`."""

    cluster: str
    model: str
    sizes: list[int] | None = None
    phases: list[Phase] = field(default_factory=lambda: list(PHASES))
    send: Send = "rank"
    calibrate: list[str] = field(default_factory=list)
    check: list[str] = field(default_factory=list)
    within: float | None = None
    published: bool = False
    json: str | None = None
    parent: int | None = None

    def run(self) -> None:
        """Prints the tables and, if requested, writes the JSON. Raises Failure and WriteError."""
        check_json(self.json)
        try:
            self._run()
        except PlanError as error:
            raise UsageFailure(str(error)) from None

    def _run(self) -> None:
        out = console(stderr=self.json == "-")
        cluster = _chosen(self.cluster, CLUSTERS, "cluster", cluster_of)
        told: list[str] = []
        if self.calibrate:
            cluster, told = calibrated(cluster, _measured(self.calibrate))
        for line in told:
            out.print(f"calibrated: {line}")
        document: dict[str, Any] = {"schema": SCHEMA, "cluster": plain(cluster), "calibration": told}
        rows: list[Compared] = []
        if self.published:
            for part in published_tables(PUBLISHED):
                out.print(part)
            document["published"] = [_published(one) for one in PUBLISHED]
            document["band"] = dataclasses.asdict(band(PUBLISHED))
        elif self.check:
            files = _measured(self.check)
            if not files.exchanges:
                reasons = "; ".join(f"{number} {why}" for why, number in files.left_out.items())
                raise PlanError(f"--check: no row that a plan covers{': ' + reasons if reasons else ''}")
            rows = compared(cluster, files.exchanges, self.calibrate)
            for part in check_tables(cluster, rows, files.left_out, self.within or TOLERANCE):
                out.print(part)
            document["check"] = [_compared(one) for one in rows]
        else:
            model = _chosen(self.model, MODELS, "model", model_of)
            document["model"] = plain(model)
            document["assumptions"] = assumptions(cluster, model)
            document["band"] = dataclasses.asdict(band(PUBLISHED))
            document["rows"] = []
            for phase in self.phases:
                if model.tokens(phase) is None and len(self.phases) > 1:
                    continue
                plans, left_out = self._plans(cluster, model, phase)
                for part in plan_tables(cluster, model, plans):
                    out.print(part)
                for line in left_out:
                    out.print(f"left out: {line}")
                document["rows"].extend(map(_planned, plans))
            for line in document["assumptions"]:
                out.print(line, highlight=False)
        if self.json is not None:
            write_text(encoder.dumps(document, indent=1) + "\n", self.json)
        if self.within is not None:
            _hold(rows, self.within)

    def _plans(self, cluster: Cluster, model: Model, phase: Phase) -> tuple[list[Planned], list[str]]:
        """The plans of all sizes. What was not asked for by number and is impossible is left out, with the reason."""
        plans: list[Planned] = []
        left_out: list[str] = []
        for ranks in self.sizes or [size for size in SIZES if size <= cluster.gpus]:
            try:
                plans.append(plan(cluster, model, phase, ranks, self.send))
            except PlanError as error:
                if self.sizes is not None or model.tokens(phase) is None:
                    raise
                left_out.append(f"EP{ranks}: {error}")
        if not plans:
            reason = f": {left_out[0]}" if left_out else f", fewer than EP{SIZES[0]}; name sizes with --ep"
            raise PlanError(f"{cluster.source}: no size can be planned with {cluster.gpus} GPUs{reason}")
        return plans, left_out


def _hold(rows: list[Compared], percent: float) -> None:
    """Raises Failure if a plan is further than ``percent`` from its measurement."""
    outside = [one for one in rows if abs(one.error) * 100 > percent]
    if outside:
        worst = max(outside, key=lambda one: abs(one.error))
        row = worst.measured.row
        raise Failure(
            f"{len(outside)} of {len(rows)} plans are more than {percent:g} % from their measurement; the worst, "
            f"{row.what} of {row.tokens} tokens on {row.ranks} ranks, is {worst.error * 100:+.1f} % off"
        )


def _chosen(text: str, known: Mapping[str, Known], what: str, parse: Any) -> Known:
    """The preset of this name, or what the file of this name says."""
    if text in known:
        return known[text]
    if "/" in text or text.endswith((".toml", ".json")):
        found: Known = parse(load(text), text)
        return found
    near = difflib.get_close_matches(text, known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise PlanError(
        f"--{what} {text}: neither a preset nor a file that ends in .toml or .json{meant}; known: {', '.join(known)}"
    )


def _measured(paths: list[str]) -> Files:
    return read(paths, [contents(path, MOST_BYTES).decode(errors="replace") for path in paths])


def _planned(one: Planned) -> dict[str, Any]:
    """A plan for JSON, with what its properties compute."""
    document = dataclasses.asdict(one)
    document["experts_per_rank"] = one.experts_per_rank
    for name, part in (("dispatch", one.dispatch), ("combine", one.combine)):
        document[name].update(us=part.us, bound=part.bound)
    document["memory"]["total"] = one.memory.total
    return document


def _compared(one: Compared) -> dict[str, Any]:
    row = one.measured.row
    names = ("what", "ranks", "tokens", "hidden", "topk", "experts", "layout", "dtype")
    shape = {name: getattr(row, name) for name in names}
    figures = {"measured_us": one.measured.us, "planned_us": one.us, "error": one.error}
    return {**shape, **figures, "file": one.measured.file, "calibrated": one.fitted}


def _published(one: Published) -> dict[str, Any]:
    planned = one.planned()
    return {
        **dataclasses.asdict(one),
        "planned_dispatch_us": planned.dispatch.us,
        "planned_combine_us": planned.combine.us,
    }


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    what = parser.add_argument_group("what is planned")
    text = f"a preset ({', '.join(CLUSTERS)}) or a TOML file: docs/plan.md (h200)"
    what.add_argument("--cluster", metavar="NAME|FILE", default="h200", help=text)
    text = f"a preset ({', '.join(MODELS)}) or a TOML file (deepseek-v3)"
    what.add_argument("--model", metavar="NAME|FILE", default="deepseek-v3", help=text)
    text = f"numbers of ranks: 8, 8,16,64, or 8:256, doubling ({SIZES[0]}:{SIZES[-1]}, as many as the cluster has)"
    what.add_argument("--ep", metavar="SIZES", type=ranks_of, help=text)
    what.add_argument("--phase", choices=(*PHASES, "both"), default="both", help="which phase (both)")
    text = "a row goes once to each rank, each selected expert, or each node, which forwards it (rank)"
    what.add_argument("--send", choices=SENDS, default="rank", help=text)
    measured = parser.add_argument_group("against measurements")
    text = "rates and latencies from the JSON of benches, instead of the cluster's"
    measured.add_argument("--calibrate", metavar="FILE", nargs="+", default=[], help=text)
    text = "show how far plans are from the dispatches and combines in the JSON of benches"
    measured.add_argument("--check", metavar="FILE", nargs="+", default=[], help=text)
    text = f"with --check: fail if a plan is further off ({TOLERANCE:g} only marks)"
    measured.add_argument("--within", metavar="PERCENT", type=percent, help=text)
    measured.add_argument("--published", action="store_true", help="published times, and plans of the same")
    parser.add_argument("--json", type=destination, metavar="FILE", help="every figure to FILE, or to stdout for `-`")
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    if parsed.within is not None and not parsed.check:
        parser.error("--within says how far off the plans of --check may be; add --check FILE")
    if parsed.published and (parsed.check or parsed.calibrate):
        parser.error("--published has its own clusters: it goes with neither --check nor --calibrate")
    phases = list(PHASES) if parsed.phase == "both" else [parsed.phase]
    return PlanOptions(sizes=parsed.ep, phases=phases, **fields_of(parsed, "ep", "phase"))


def percent(text: str) -> float:
    """A number of percent, greater than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent from 0 to 1000, 0 excluded")
    return number


def ranks_of(text: str) -> list[int]:
    """Numbers of ranks: `8`, `8,16,64`, or `8:256`, which doubles. Their order is kept, duplicates are not."""
    least, colon, most = text.partition(":")
    words: Collection[str] = (least, most) if colon else text.split(",")
    numbers = [int(word) if word.isascii() and word.isdigit() and len(word) < 8 else 0 for word in words]
    if not all(1 <= number <= MOST_RANKS for number in numbers) or (colon and numbers[0] > numbers[1]):
        form = "write 8, or 8,16,64, or 8:256"
        raise argparse.ArgumentTypeError(f"{text!r}: {form}, each from 1 to {MOST_RANKS}")
    if not colon:
        return list(dict.fromkeys(numbers))
    return [numbers[0] << shift for shift in range(17) if numbers[0] << shift <= numbers[1]]
