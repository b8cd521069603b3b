"""`crossrail plan`: its page's files and commands, its JSON, and one line for every mistake in a file."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import run

from crossrail_tools.cli.command_line import parse_arguments
from crossrail_tools.cli.failure import Failure, UsageFailure
from crossrail_tools.planning import reading

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
CLUSTER, MODEL = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
GPU = "benches/results/gpu"

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML reader")


@pytest.fixture(autouse=True)
def _in_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands of the page find the results that they name, and its two files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benches").symlink_to(ROOT / "benches")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "model.toml").write_text(MODEL)


def plan(*words: str) -> None:
    parse_arguments(["plan", *words]).run()


def document(*words: str) -> dict[str, Any]:
    plan(*words, "--json", "plan.json")
    loaded: dict[str, Any] = json.loads(Path("plan.json").read_text())
    assert loaded["schema"] == "crossrail-plan/1"
    return loaded


COMMANDS = re.findall(r"^    (crossrail plan.*?)(?: +#.*)?$", PAGE, re.MULTILINE)


@needs_toml
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_page_runs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMANDS) == 6
    plan(*shlex.split(line)[2:])
    out = capsys.readouterr().out
    assert "bound by" in out or "off by" in out


@needs_toml
def test_json_has_links_apart_and_both_phases() -> None:
    rows = document("--cluster", "cluster.toml", "--model", "model.toml", "--ep", "8,64")["rows"]
    assert [(row["phase"], row["ranks"], row["nodes"]) for row in rows] == [
        ("decode", 8, 1),
        ("decode", 64, 8),
        ("prefill", 8, 1),
        ("prefill", 64, 8),
    ]
    one, eight = rows[:2]
    assert one["dispatch"]["network_bytes"] == 0 < one["dispatch"]["nvlink_bytes"]
    assert eight["dispatch"]["fabric_bytes"] < eight["dispatch"]["network_bytes"]
    assert eight["combine"]["us"] >= eight["combine"]["network_us"]
    assert eight["experts_per_rank"] == 4
    assert one["memory"]["total"] == pytest.approx(sum(one["memory"][kind] for kind in ("weights", "heap", "results")))


@pytest.mark.parametrize("stdout", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_json_goes_to_stdout_and_tables_to_stderr(stdout: str) -> None:
    done = run("plan", "--ep", "8", "--phase", "decode", "--json", stdout)
    assert done.returncode == 0
    assert json.loads(done.stdout)["rows"][0]["ranks"] == 8
    assert "bound by" in done.stderr


def test_where_the_network_takes_over_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    plan("--phase", "prefill")
    out = capsys.readouterr().out
    assert "NVLink up to EP8, the network from EP16." in out
    assert "EP1024 768" in out
    assert re.search(r"! EP4, EP1024, EP2048: .* more than the 141 GB", out)


def test_every_output_names_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        plan(*words)
        return " ".join(capsys.readouterr().out.split())

    both = said("--ep", "8")
    assert both.count("MB and us: one GPU's, of one layer; MB of dispatch and combine together, sent") == 1
    assert "step ms: all 58 layers" in both
    assert "Not in the times: the experts' computation, attention, other collectives" in both
    assert "not attention, KV cache and activations" in both
    assert "NVLink 399 GB/s and rows at the experts" in both
    assert "network 50 GB/s for each GPU (8 NICs of 50 GB/s for 8)" in both
    published = said("--published")
    for text in (both, published):
        assert re.search(r"Error band: \d+ of \d+ published times .* above their plan, .* 8 of 10 are [\d.]+ to ", text)
    assert "planned us" in published and "us: of one layer" in published and "h800: NVLink " in published
    checked = said("--calibrate", f"{GPU}/ep_sweep-2.json", "--check", f"{GPU}/ep_decode-4.json")
    assert "us: of one layer, all ranks on one node. Rates of the plans: NVLink " in checked
    assert "no network" in checked


def test_the_band_is_of_the_published_rows() -> None:
    whole = document("--published")
    errors = [
        row[f"{what}_us"] / row[f"planned_{what}_us"] for row in whole["published"] for what in ("dispatch", "combine")
    ]
    band = document("--ep", "8")["band"]
    assert band == whole["band"]
    assert (band["above"], band["of"]) == (sum(error > 1 for error in errors), len(errors))
    assert sum(band["low"] <= error <= band["high"] for error in errors) == pytest.approx(0.8 * len(errors), abs=2)
    assert sum(error <= band["median"] for error in errors) == pytest.approx(len(errors) / 2, abs=1)


def test_a_check_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--calibrate", f"{GPU}/ep_sweep-2.json", "--check", f"{GPU}/ep_decode-4.json", f"{GPU}/ep_prefill-4.json")
    checked = document(*words, "--within", "15")["check"]
    assert len(checked) == 9
    assert all(abs(row["error"]) <= 0.15 and not row["calibrated"] for row in checked)
    assert "9 of 9 measurements within 15 %" in capsys.readouterr().out
    with pytest.raises(Failure, match=r"of 9 plans are more than 0\.5 % from their measurement; the worst, ") as failed:
        plan(*words, "--within", "0.5")
    assert failed.value.exit_code == 1


def test_rows_of_the_calibration_are_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    plan("--calibrate", f"{GPU}/ep_sweep-2.json", "--check", f"{GPU}/ep_sweep-2.json")
    out = capsys.readouterr().out
    assert "of 36 measurements that the calibration also used within 15 %" in out
    assert "left out: 6 rows routed otherwise than uniformly (one)" in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("gpus_per_node", "gpus_per_nod"), "gpus_per_nod: unknown key (did you mean gpus_per_node?); known: name, "),
        (("nics_per_node", "nics"), "network.nics: unknown key (did you mean nics_per_node?); known: nics_per_node"),
        (("nodes = 8", 'nodes = "8"'), "nodes: '8' is not a whole number"),
        (("nodes = 8", "nodes = true"), "nodes: True is not a whole number"),
        (("nodes = 8", "nodes = 0"), "nodes: 0 is not in 1 to 1048576"),
        (("nodes = 8", ""), "nodes: missing"),
        (("gb_per_s = 399", "gb_per_s = 0"), "nvlink.gb_per_s: 0 is not a finite number greater than 0"),
        (("gb_per_s = 50", "gb_per_s = -1"), "network.gb_per_s: -1 is not a finite number greater than 0"),
        (("gb_per_s = 50", "gb_per_s = inf"), "network.gb_per_s: inf is not a finite number greater than 0"),
        (("gb_per_s = 50", "gb_per_s = nan"), "network.gb_per_s: nan is not a finite number greater than 0"),
        (("memory_gb = 141", f"memory_gb = 1{'0' * 400}"), "gpu.memory_gb: an int is not a finite number"),
        (("oversubscription = 2", "oversubscription = 0.5"), "0.5 is not a finite number of at least 1"),
        (("pair_us = 3.3", "pair_us = 30"), "operations.pair_us: 30 is more than dispatch_us + combine_us"),
        (("[gpu]", "[gpus]"), "gpus: unknown key (did you mean gpu?)"),
        (("[gpu]", f"[{'g' * 5000}]"), f"cluster.toml: {'g' * 80}: unknown key; known: "),
        (('name = "eight', 'name = "\\neight'), "is not a line of text"),
        (("nodes = 8", "nodes ="), "Invalid value (at line 2, column 8)"),
    ],
)
@needs_toml
def test_mistakes_in_a_cluster(change: tuple[str, str], text: str) -> None:
    assert change[0] in CLUSTER
    Path("cluster.toml").write_text(CLUSTER.replace(*change, 1))
    with pytest.raises(UsageFailure) as failed:
        plan("--cluster", "cluster.toml")
    assert str(failed.value).startswith("cluster.toml: ")
    assert text in str(failed.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("topk = 8", "top_k = 8"), "top_k: unknown key (did you mean topk?)"),
        (("topk = 8", "topk = 300"), "topk: 300 is more than experts = 256"),
        (("topk_groups = 4", "topk_groups = 9"), "topk_groups: 9 is more than groups = 8"),
        (("topk = 8\n", "topk = 129\n"), "topk: 129 is more than the 128 experts of topk_groups = 4"),
        (("groups = 8", "groups = 7"), "groups: experts = 256 do not divide into 7 groups"),
        (("hidden = 7168", "hidden = 7100"), "hidden: 7100 is not a multiple of 128, as fp8 rows need"),
        (('"auto"', '"all"'), "redundant_experts: 'all' is neither a whole number from 0 nor \"auto\""),
        (('dispatch = "fp8"', 'dispatch = "fp16"'), "types.dispatch: 'fp16' is not known; known: bf16, fp8, nvfp4"),
        (("experts = 256", "experts = 99999999"), "experts: 99999999 is not in 1 to 65536"),
        (("imbalance = 1.2", "imbalance = 0.9"), "imbalance: 0.9 is not a finite number of at least 1"),
        (("tokens = 128", "token = 128"), "decode.token: unknown key (did you mean tokens?); known: tokens"),
        (('"auto"', "0"), "redundant_experts: 256 experts and 0 redundant ones do not divide over 48 ranks; 32 would"),
    ],
)
@needs_toml
def test_mistakes_in_a_model(change: tuple[str, str], text: str) -> None:
    assert change[0] in MODEL
    Path("model.toml").write_text(MODEL.replace(*change, 1))
    with pytest.raises(UsageFailure) as failed:
        plan("--model", "model.toml", "--ep", "48")
    assert str(failed.value).startswith("model.toml: ")
    assert text in str(failed.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--cluster", "h300"), "--cluster h300: neither a preset nor a file"),
        (("--model", "deepseek"), "(did you mean deepseek-v3?); known: deepseek-v3, "),
        (("--cluster", "none.toml"), "none.toml: No such file or directory"),
        (("--cluster", "./"), "./: Is a directory"),
        (("--calibrate", "none.json"), "none.json: No such file or directory"),
        (("--check", f"{GPU}/all-to-all-4.json"), "schema is 'crossrail-goals/1'"),
        (("--check", f"{GPU}/unpack-2.json"), "--check: no row that a plan covers"),
        (("--check", "benches/results/ep-wire.json"), "--check: no row that a plan covers: 3 in host memory"),
        (("--calibrate", f"{GPU}/ep_decode-4.json"), "measured with 1 different numbers of bytes, and a fit needs 3"),
        (("--ep", "4096"), "preset h200: nodes: 256 nodes of 8 GPUs are 2048 ranks, fewer than EP4096"),
    ],
)
def test_other_mistakes(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageFailure, match=re.escape(text)):
        plan(*words)


def test_files_as_json_and_bad_ones() -> None:
    shape = {"experts": 64, "topk": 4, "hidden": 1024, "decode": {"tokens": 8}}
    Path("model.json").write_text(json.dumps(shape))
    assert [row["phase"] for row in document("--model", "model.json", "--ep", "4")["rows"]] == ["decode"]
    for text, complaint in (("[]", "a list, not an object"), ("{", "Expecting"), ('{"experts": NaN}', "not a whole")):
        Path("model.json").write_text(text)
        with pytest.raises(UsageFailure, match=f"model.json: .*{complaint}"):
            plan("--model", "model.json")
    Path("model.json").write_text(json.dumps({**shape, "types": 3}))
    with pytest.raises(UsageFailure, match=r"model.json: types: an int, not a table"):
        plan("--model", "model.json")
    Path("model.json").write_bytes(b"\xff")
    with pytest.raises(UsageFailure, match=r"model.json: not UTF-8 text"):
        plan("--model", "model.json")
    Path("model.json").write_text(" " * (reading.MOST_BYTES + 1))
    with pytest.raises(UsageFailure, match=r"model.json: longer than 1 MiB"):
        plan("--model", "model.json")
    Path("model.json").write_text(json.dumps({**shape, "prefill": None, "decode": None}))
    with pytest.raises(UsageFailure, match=r"decode: missing, and so is prefill"):
        plan("--model", "model.json")


def test_a_phase_that_the_model_does_not_have() -> None:
    shape = {"experts": 64, "topk": 4, "hidden": 1024, "decode": {"tokens": 8}}
    Path("model.json").write_text(json.dumps(shape))
    with pytest.raises(UsageFailure, match=r"model.json: \[prefill\] is missing: the tokens of each rank"):
        plan("--model", "model.json", "--phase", "prefill")


@needs_toml
def test_sizes_that_the_cluster_does_not_allow_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.toml").write_text(MODEL.replace('"auto"', "8"))
    plan("--cluster", "cluster.toml", "--model", "model.toml", "--phase", "decode")
    out = capsys.readouterr().out
    assert (
        "left out: EP16: model.toml: redundant_experts: 256 experts and 8 redundant ones do not divide over 16" in out
    )
    assert re.search(r"^8 +1 +33 ", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ep", "0"], "'0': write 8, or 8,16,64, or 8:256, each from 1 to 65536"),
        (["--ep", "64:8"], "'64:8': write 8"),
        (["--ep", "8:"], "'8:': write 8"),
        (["--within", "5"], "--within says how far off the plans of --check may be; add --check FILE"),
        (["--check", "x", "--within", "nan"], "'nan' is not a number of percent"),
        (["--published", "--check", "x"], "--published has its own clusters"),
        (["--send", "gpu"], "invalid choice: 'gpu'"),
    ],
)
def test_bad_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(*words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_exit_codes() -> None:
    done = run("plan", "--cluster", "none.toml")
    assert done.returncode == 2
    assert done.stderr == "crossrail: error: none.toml: No such file or directory\n"
