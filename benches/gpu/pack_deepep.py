"""Fetches the wheel of DeepEP V1 for the GPU machine's Python, without symbols: it needs PyTorch and nothing else.

python benches/gpu/pack_deepep.py .gpu/deepep.tar.xz
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pack_nixl import fetch

NAME = "tokenspeed-deepep==1.2.1.post20251110"


def main() -> int:
    """Writes the archive."""
    if len(sys.argv) != 2:
        print("usage: pack_deepep.py ARCHIVE.tar.xz", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="crossrail-deepep-") as scratch:
        root = Path(scratch) / "deepep"
        with zipfile.ZipFile(fetch(Path(scratch), NAME)) as wheel:
            wheel.extractall(root)
        for library in root.glob("*.so"):
            subprocess.run(["strip", library], check=True)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    archive.add(path, path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
