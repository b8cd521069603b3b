"""Installs what the tests run, which `make test` has compiled together with Rust's tests: the extension, the network
plugin for NCCL, and the package in the environment of this interpreter, from where it is.

    python packaging/for_tests.py FOLDER        in the folder of pyproject.toml

FOLDER has lib_native.so and libnccl_net_crossrail.so.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from crossrail_build import prepare_metadata_for_build_editable
from nccl_plugin import LIBRARY, ROOT, replace

EXTENSION = ROOT / "python" / "crossrail" / "_native.abi3.so"


def main() -> None:
    """Puts both libraries into the package, and the package into the environment where it is missing."""
    folder = Path(sys.argv[1])
    replace(EXTENSION, folder / "lib_native.so")
    replace(LIBRARY, folder / "libnccl_net_crossrail.so")
    if not installed():
        with tempfile.TemporaryDirectory() as scratch:
            wheel = editable_wheel(Path(scratch))
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "--no-deps", "--no-index", "--force-reinstall", wheel], check=True)


def installed() -> bool:
    """Whether this interpreter has the package, from this folder."""
    try:
        files = importlib.metadata.files("crossrail") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    paths = [file.read_text().strip() for file in files if file.name == "crossrail.pth"]
    return paths == [str(ROOT / "python")]


def editable_wheel(folder: Path) -> Path:
    """A wheel of the metadata and of the path to the package, as `maturin develop` makes it."""
    name = prepare_metadata_for_build_editable(str(folder))
    version = name.removesuffix(".dist-info")
    tags = (folder / name / "WHEEL").read_text()
    tag = next(line.removeprefix("Tag: ") for line in tags.splitlines() if line.startswith("Tag: "))
    wheel = folder / f"{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in sorted(path for path in (folder / name).rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(folder))
        archive.writestr("crossrail.pth", str(ROOT / "python"))
        archive.writestr(f"{name}/RECORD", "".join(f"{file},,\n" for file in archive.namelist()))
    return wheel


if __name__ == "__main__":
    main()
