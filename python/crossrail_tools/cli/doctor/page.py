"""Prints `docs/doctor.md`: ``python -m crossrail_tools.cli.doctor.page > docs/doctor.md``."""

from __future__ import annotations

from .show import page

if __name__ == "__main__":
    print(page(), end="")
