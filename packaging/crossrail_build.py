"""The build backend: wraps maturin's, and fails early without Rust.

Without Rust, maturin silently downloads a toolchain of several hundred megabytes into a temporary folder."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import nccl_plugin

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

NO_GIL = """\
crossrail does not support Python without a global interpreter lock: its module relies on the lock to order the release
of buffers and the end of the interpreter. Use the ordinary build of this version (python3, not python3t)."""
MISSING_RUST = Path(__file__).with_name("missing_rust.txt")

os.environ["MATURIN_NO_INSTALL_RUST"] = "1"


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """Packages to install before a build: none. Exits with the reason when there is no Rust, or Python has no GIL."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(NO_GIL)
    if shutil.which("cargo") is None:
        sys.exit(MISSING_RUST.read_text(encoding="utf-8"))
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds the network plugin for NCCL, and the wheel with it. Source distributions do not have the plugin."""
    if nccl_plugin.SOURCES.is_dir():
        nccl_plugin.build()
    return str(maturin.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """As `build_wheel`, for an editable install."""
    if nccl_plugin.SOURCES.is_dir():
        nccl_plugin.build()
    return str(maturin.build_editable(wheel_directory, config_settings, metadata_directory))
