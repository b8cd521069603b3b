"""How tests are distributed where they run side by side (pytest --numprocesses).

Each test goes to whichever worker is free next, but for those of TOGETHER: they stay on one worker, one after the
other, and begin first, as no single test takes as long as a group. Groups are found by the path in a
test's name, which works with every version of pytest and pytest-xdist: pytest-xdist 3.8 ignores the mark
``xdist_group`` with pytest 9.2, and says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

__all__ = ["pytest_xdist_make_scheduler"]

# Beds use both processors, and find out what is slow by the time that it takes. But mostly they wait, and one after the
# other they would take longer than everything else: those of rails are one group, all others a second one.
RAILS = tuple(
    f"tests/testbed/test_{name}.py" for name in ("rails", "ucx", "quiet", "chaos", "sweep_between", "net_plugin")
)
TOGETHER = (
    *RAILS,
    "tests/testbed/",
    # They build one program: side by side, one worker would only wait for the other's build.
    "tests/python/test_instructions.py",
    # Their fixtures start ranks, build wheels or compile a driver: side by side, every worker would do so again.
    "tests/python/test_ep_exchange.py",
    "tests/python/test_ep_options.py",
    "tests/python/test_ep_bad_input.py",
    "tests/python/test_drop_in_packages.py",
    "tests/python/test_driver_calls.py",
)


def group(name: str) -> str:
    """The tests among which this one runs one after the other: itself alone, unless its path is in TOGETHER."""
    path = next((path for path in TOGETHER if name.startswith(path)), name)
    return RAILS[0] if path in RAILS else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    # Imported here: what runs on the machine with a GPU has no pytest-xdist.
    from xdist.scheduler import LoadScopeScheduling

    class Distribution(LoadScopeScheduling):
        """It assigns larger groups first, and single tests in their order."""

        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Distribution(config, log)
