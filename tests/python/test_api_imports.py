"""What importing the package costs: nothing that only expert buffers need."""

from __future__ import annotations

import subprocess
import sys

import pytest

import crossrail
from crossrail_tools.cli.rank_process import KINDS


@pytest.mark.parametrize("module", ["crossrail", "crossrail_tools.cli"])
def test_importing_does_not_import_numpy(module: str) -> None:
    program = f"import sys, {module}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"doctor"}))
def test_a_rank_starts_without_what_only_shows_reports(kind: str) -> None:
    # rich takes a fifth of the start of a rank, of which a plan may start dozens. The doctor has one second process.
    module = f"crossrail_tools.cli{KINDS[kind]}"
    program = f"import sys, {module}; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_library_imports_no_tool() -> None:
    program = (
        "import pkgutil, importlib, sys, crossrail\n"
        "for module in pkgutil.walk_packages(crossrail.__path__, 'crossrail.'):\n"
        "    if not module.name.endswith(('__main__', '.libnccl-net-crossrail')):\n"
        "        importlib.import_module(module.name)\n"
        "print(*sorted(sys.modules), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    names = done.stdout.split()
    assert "crossrail.deep_ep.buffer" in names
    assert not {"crossrail_tools", "rich"} & {name.partition(".")[0] for name in names}


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "crossrail", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"crossrail {crossrail.__version__}\n"


def test_every_public_name_is_there() -> None:
    assert set(crossrail.__all__) == set(dir(crossrail))
    assert all(getattr(crossrail, name) is not None for name in crossrail.__all__)
    assert crossrail.ExpertBuffer.__module__ == "crossrail.experts"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'crossrail' has no attribute 'Nothing'"):
        _ = crossrail.Nothing
