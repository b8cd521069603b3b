"""A `__del__` that prints nothing, for objects that call native code or modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TypeVar

Self = TypeVar("Self")


def at_end(end: Callable[[Self], object]) -> Callable[[Self], None]:
    """Makes a ``__del__`` of `end`: nothing is raised from it, which Python would print.

    It does nothing while the interpreter finalizes and module names are already cleared: the workers were closed
    before, so that no peer accesses memory any more.
    """

    # Defaults are bound now: module names may be cleared when it runs.
    def __del__(
        self: Self,
        ends: Callable[[], bool] = sys.is_finalizing,
        quiet: type[contextlib.suppress] = contextlib.suppress,
    ) -> None:
        if not ends():
            with quiet(Exception):
                end(self)

    return __del__
