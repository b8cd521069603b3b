"""Packs what the GPU tests import of vLLM's and SGLang's published packages: Python files only.

python benches/gpu/pack_engines.py .gpu/engines.tar.xz
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "engines"))

from ends_of_engines import EXPERTS, HERE, site_of

IMPORTED = """
import sys
from absent import importing
with importing("torch", "triton", "deep_ep"):
    import published_experts
    getattr(published_experts, sys.argv[1])(sys.argv[2])
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == sys.argv[1] and getattr(module, "__file__", None):
        print(module.__file__)
"""
"""Names every file of an engine that its classes of experts import, where neither PyTorch nor deep_ep has to be."""


def main() -> int:
    """Writes the archive."""
    if len(sys.argv) != 2:
        print("usage: pack_engines.py ARCHIVE.tar.xz", file=sys.stderr)
        return 2
    with tarfile.open(sys.argv[1], "w:xz") as archive:
        for engine, package in EXPERTS.items():
            site = site_of(package)
            command = [sys.executable, "-W", "ignore", "-c", IMPORTED, engine, site]
            listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE).stdout
            for path in map(Path, listed.splitlines()):
                archive.add(path, Path("engines") / path.relative_to(site))
    return 0


if __name__ == "__main__":
    sys.exit(main())
