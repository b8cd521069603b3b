"""Programs that packaging runs, and Debian's packages that have them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

PACKAGES = {
    "apt-get": "apt",
    "ar": "binutils",
    "c++": "g++",
    "cc": "gcc",
    "ld": "binutils",
    "objcopy": "binutils",
    "qemu-aarch64-static": "qemu-user-static",
    "qemu-x86_64-static": "qemu-user-static",
    "readelf": "binutils",
}
"""Packages of programs that have another name than theirs."""


def missing(names: Iterable[str]) -> str:
    """Text for people: programs that are not installed, and their packages; empty if none is missing."""
    lacking = [name for name in dict.fromkeys(names) if shutil.which(name) is None]
    packages = dict.fromkeys(PACKAGES.get(name, name) for name in lacking)
    return f"{', '.join(lacking)}: not installed (Debian: {', '.join(packages)})" if lacking else ""
