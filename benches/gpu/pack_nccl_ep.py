"""Fetches NCCL EP for the GPU machine's Python, and the NCCL whose headers its kernels are compiled with.

python benches/gpu/pack_nccl_ep.py .gpu/nccl-ep.tar.xz

The archive has one folder, nccl-ep: `site` for the path of Python, and `home` with NCCL's library and headers. NCCL
keeps the kernels of one architecture; the libraries for CUDA 12, and those of M2N, are left out.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pack_deepep_v2 import ARCHITECTURE, NCCL, NCCL_PLATFORM, keep_one
from pack_nixl import fetch

PACKAGES = ("nccl-extensions==0.1.0", "nccl4py==0.6.0")
PLATFORM = "manylinux_2_28_x86_64"
LEFT_OUT = ("nccl/ep/lib/cu12", "nccl/m2n/lib")


def main() -> int:
    """Writes the archive."""
    if len(sys.argv) != 2:
        print("usage: pack_nccl_ep.py ARCHIVE.tar.xz", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="crossrail-nccl-ep-") as scratch:
        root = Path(scratch) / "nccl-ep"
        for name in PACKAGES:
            _unpack(Path(scratch), name, PLATFORM, root / "site")
        _unpack(Path(scratch), NCCL, NCCL_PLATFORM, root)
        (root / "nvidia" / "nccl").rename(root / "home")
        shutil.rmtree(root / "nvidia")
        for folder in LEFT_OUT:
            shutil.rmtree(root / "site" / folder)
        library = root / "home" / "lib" / "libnccl.so.2"
        slim = bytearray(library.read_bytes())
        keep_one(slim, ARCHITECTURE)
        library.write_bytes(slim)
        library.with_name("libnccl.so").symlink_to(library.name)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            archive.add(root, root.name)
    return 0


def _unpack(scratch: Path, name: str, platform: str, into: Path) -> None:
    wheel = fetch(scratch / name.partition("=")[0], name, platform)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)


if __name__ == "__main__":
    sys.exit(main())
