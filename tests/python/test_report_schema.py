"""The JSON form: reads back what was written, leaves out what does not apply, refuses what it is not."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import environment, p2p_report

import crossrail_tools.report
from crossrail_tools.report.schema import SCHEMA, Report, Row, SchemaError


def test_a_report_reads_back_as_it_was() -> None:
    report = p2p_report()
    assert Report.loads(report.dumps()) == report


def test_the_form_is_the_published_one() -> None:
    data = json.loads(p2p_report().dumps())
    assert list(data) == ["schema", "environment", "command", "rows"]
    assert data["schema"] == SCHEMA == "crossrail-bench/1"
    row = data["rows"][0]
    for name in ("what", "transport", "size", "samples_us", "p50_us", "p99_us", "avg_us", "min_us", "max_us"):
        assert name in row, name
    assert row["lanes"][0].keys() >= {"name", "bytes", "share"}
    assert row["ratio"].keys() == {"iperf3"}
    assert row["peers"]["iperf3"]["gb_per_s"] > 0


def test_what_does_not_apply_is_left_out_but_zero_is_not() -> None:
    row = Row(what="latency", transport="shm", size=0, avg_us=0.0)
    data = json.loads(Report(environment(), [], [row]).dumps())["rows"][0]
    assert data == {"what": "latency", "transport": "shm", "size": 0, "avg_us": 0.0}


def test_an_environment_with_nothing_to_say_reads_back() -> None:
    bare = replace(environment(), governor=None, commit=None, settings={}, load_average=[], cores_allowed=[])
    assert Report.loads(Report(bare, [], []).dumps()).environment == bare


def test_fields_of_a_later_release_are_passed_over() -> None:
    data = json.loads(p2p_report().dumps())
    data["rows"][0]["colour"] = "green"
    assert Report.loads(json.dumps(data)) == p2p_report()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(schema="crossrail-bench/9"), "crossrail-bench/9"),
        (lambda data: data.pop("schema"), "schema is None"),
        (lambda data: data.update(rows={}), "report.rows: a list"),
        (lambda data: data["rows"][0].update(size="64M"), "report.rows[0].size: int"),
        (lambda data: data["rows"][0].update(size=True), "report.rows[0].size: int"),
        (lambda data: data["rows"][0].update(samples_us=["1"]), "samples_us[0]: float"),
        (lambda data: data["rows"][0].pop("what"), "report.rows[0].what is missing"),
        (lambda data: data["environment"].pop("host"), "report.environment.host is missing"),
    ],
)
def test_what_is_no_report_says_where(change, said: str) -> None:
    data = json.loads(p2p_report().dumps())
    change(data)
    with pytest.raises(SchemaError) as caught:
        Report.loads(json.dumps(data))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\0", "[" * 100_000])
def test_garbage_is_a_schema_error(text: str) -> None:
    with pytest.raises(SchemaError):
        Report.loads(text)


def test_a_figure_that_is_no_number_is_never_written() -> None:
    with pytest.raises(ValueError):
        Report(environment(), [], [Row(what="latency", transport="shm", size=1, avg_us=float("nan"))]).dumps()


def test_report_never_imports_the_native_module() -> None:
    for path in Path(crossrail_tools.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
                assert node.level <= 1, f"{path.name} imports from above its folder"
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not any("_native" in name or name.split(".")[0] == "crossrail" for name in names), path.name
