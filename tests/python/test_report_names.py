"""Names of `crossrail_tools.report` are imported on first use, and all of them exist."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

from crossrail_tools import report


@pytest.mark.parametrize("name", sorted(report.__all__))
def test_every_name_is_found_in_its_module(name: str) -> None:
    assert name in report._MODULE_OF
    assert getattr(report, name) is not None


def test_every_name_of_a_module_is_public() -> None:
    assert set(report._MODULE_OF) == set(report.__all__) <= set(dir(report))


def test_no_module_is_called_like_a_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(report.__path__)}
    assert not modules & set(report.__all__)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = report.nothing


def test_a_command_without_tables_does_not_import_what_draws_them() -> None:
    script = (
        "import sys\nfrom crossrail_tools.cli import main\n"
        "print(main(['store', '--help']))\nprint('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["0", "False"]


def test_ends_and_ranks_do_not_import_what_draws_tables() -> None:
    modules = ", ".join(
        f"crossrail_tools.cli.{name}"
        for name in ("point_to_point", "mesh", "control", "ep.host", "ep.elastic", "ep.cuda")
    )
    script = f"import sys\nimport {modules}\nprint('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
