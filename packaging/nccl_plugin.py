"""Builds the network plugin for NCCL into the package, from where the wheel takes it.

python packaging/nccl_plugin.py                     for this machine
python packaging/nccl_plugin.py --zig TARGET        for another, or an older glibc: by cargo-zigbuild
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "crates" / "nccl-plugin"
LIBRARY = ROOT / "python" / "crossrail" / "libnccl-net-crossrail.so"
GLIBC = "2.28"


def build(zig_target: str | None = None) -> None:
    """Builds it as it is released. Raises CalledProcessError."""
    command = ["cargo" if zig_target is None else "cargo-zigbuild", "rustc", "--quiet", "--release", "--locked"]
    command += ["--package", "crossrail-nccl-plugin", "--lib"]
    command += [] if zig_target is None else ["--target", f"{zig_target}.{GLIBC}"]
    # Stripped by the linker, so that everything below is what the extension module is made of.
    subprocess.run([*command, "--", "-Cstrip=symbols"], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = target / (zig_target or "") / "release" / "libnccl_net_crossrail.so"
    # Replaced in one step: a running program may have the old one loaded.
    new = LIBRARY.with_suffix(".new")
    shutil.copyfile(built, new)
    new.replace(LIBRARY)


def main() -> int:
    """Builds the library; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--zig", metavar="TARGET", help="a target such as aarch64-unknown-linux-gnu")
    try:
        build(parser.parse_args().zig)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
