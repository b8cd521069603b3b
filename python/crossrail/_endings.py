"""The end of objects that call native code or modules: quiet, whenever it comes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TypeVar

Self = TypeVar("Self")


def at_end(end: Callable[[Self], object]) -> Callable[[Self], None]:
    """Makes a ``__del__`` of `end`: nothing is raised from it, which Python would print.

    It does nothing while the interpreter ends, when names of modules are gone: the workers were closed before, and
    nobody accesses memory or sends any more.
    """

    # Bound here: names of modules may be gone when it runs.
    def __del__(
        self: Self,
        ends: Callable[[], bool] = sys.is_finalizing,
        quiet: type[contextlib.suppress] = contextlib.suppress,
    ) -> None:
        if not ends():
            with quiet(Exception):
                end(self)

    return __del__
