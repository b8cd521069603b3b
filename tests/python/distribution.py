"""How tests are distributed where they run side by side (pytest --numprocesses).

Each test goes to whichever worker is free next, but for those of TOGETHER: they stay on one worker, one after the
other, and begin first, as each of these groups takes longer than anything else. Groups are found by the path in a
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

TOGETHER = (
    # Beds use both processors, and find out what is slow by the time that it takes.
    "tests/testbed/",
    # They build one program: side by side, one worker would only wait for the other's build.
    "tests/python/test_instructions.py",
)


def group(name: str) -> str:
    """The tests among which this one runs one after the other: itself alone, unless its path is in TOGETHER."""
    return next((path for path in TOGETHER if name.startswith(path)), name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    # Imported here: what runs on the machine with a GPU has no pytest-xdist.
    from xdist.scheduler import LoadScopeScheduling

    class Distribution(LoadScopeScheduling):
        """It assigns larger groups first, and single tests in their order."""

        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Distribution(config, log)
