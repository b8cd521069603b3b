"""Fetches NIXL's wheel and keeps what its UCX backend needs: a quarter of it, without file and object storage.

python benches/gpu/pack_nixl.py .gpu/nixl.tar.xz
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

NAME = "nixl-cu13==1.5.1"
PYTHON = "3.12"
PLATFORM = "manylinux_2_28_x86_64"

# Where the wheel keeps its shared objects, and those that are opened by name: the backend, and UCX's transports.
FOLDERS = (".nixl_cu13.mesonpy.libs", "nixl_cu13.libs")
BACKEND = ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so"
TRANSPORTS = ("libuct_cuda", "libucm_cuda", "libuct_cma")

# UCX's loader opens its modules with the whole extension of its own file, libucs-HASH.so.0.0.0, and not by the shorter
# names that the wheel has too: without this one it says nothing, and takes GPU memory for the host's.
EXTENSION = ".so.0.0.0"


def main() -> int:
    """Writes the archive."""
    if len(sys.argv) != 2:
        print("usage: pack_nixl.py ARCHIVE.tar.xz", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="crossrail-nixl-") as scratch:
        root = Path(scratch) / "nixl"
        with zipfile.ZipFile(fetch(Path(scratch))) as wheel:
            wheel.extractall(root)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            for path in needed(root):
                archive.add(path, path.relative_to(root))
    return 0


def fetch(folder: Path, name: str = NAME, platform: str = PLATFORM) -> Path:
    """A wheel for the GPU machine's Python, by pip, into a folder that has no other."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    target = [f"--python-version={PYTHON}", f"--platform={platform}", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options, *target, name]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def needed(root: Path) -> list[Path]:
    """The Python files, and every shared object that they, the backend or UCX's transports link to."""
    libraries = {path.name: path for folder in FOLDERS for path in sorted((root / folder).glob("*.so*"))}
    folders = [root / "nixl_cu13", *root.glob("*.dist-info")]
    package = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    transports = [root / "nixl_cu13.libs" / "ucx" / (name + EXTENSION) for name in TRANSPORTS]
    todo = [*package, root / BACKEND, *transports]
    found: dict[Path, None] = {}
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = None
        todo += [libraries[name] for name in links(path) if name in libraries]
    return sorted(found)


def links(path: Path) -> list[str]:
    """The shared objects that one links to."""
    if ".so" not in path.name:
        return []
    listed = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", listed)


if __name__ == "__main__":
    sys.exit(main())
