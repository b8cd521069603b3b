"""Fetches a peer for the GPU machine's Python, and packs the parts that are needed.

python benches/gpu/pack.py nixl .gpu/nixl.tar.xz

nixl: a quarter of NIXL's wheel, for its UCX backend, without file and object storage. deepep: DeepEP V1, which
needs PyTorch and nothing else. deepep-v2: DeepEP V2 and the NCCL that it needs, which is newer than PyTorch's, in a
folder for the path of this peer alone: its `deep_ep` is also the name of V1's. nccl-ep: NCCL EP, in `site` of its
folder for the path of Python, and `home` with the NCCL whose headers its kernels are compiled with; libraries for CUDA
12 and those of M2N are left out. engines: the Python files of vLLM's and SGLang's published packages that the GPU tests
import. Libraries have no symbols, and NCCL keeps the kernels of one architecture, which makes it a tenth as large.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PYTHON = "3.12"
PLATFORM = "manylinux_2_28_x86_64"
NIXL = "nixl-cu13==1.5.1"
DEEPEP = {1: "tokenspeed-deepep==1.2.1.post20251110", 2: "tokenspeed-deepep==2.1.0.post20260801"}
NCCL = "nvidia-nccl-cu13==2.30.7"
NCCL_PLATFORM = "manylinux_2_18_x86_64"
NCCL_EP = ("nccl-extensions==0.1.0", "nccl4py==0.6.0")
LEFT_OUT = ("nccl/ep/lib/cu12", "nccl/m2n/lib")
ARCHITECTURE = 90
"""Whose kernels NCCL keeps: those of its users are compiled for the GPU at hand."""

# Where the wheel keeps its shared objects, and those that are opened by name: the backend, and UCX's transports.
FOLDERS = (".nixl_cu13.mesonpy.libs", "nixl_cu13.libs")
BACKEND = ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so"
TRANSPORTS = ("libuct_cuda", "libucm_cuda", "libuct_cma")

# UCX's loader opens its modules with the whole extension of its own file, libucs-HASH.so.0.0.0, and not by the shorter
# names that the wheel has too: without this one it says nothing, and takes GPU memory for the host's.
EXTENSION = ".so.0.0.0"

# A fat binary: containers, one after the other, each with entries for architectures.
CONTAINER = 0xBA55ED50
SECTIONS_OF_CODE, SECTION_OF_PARTS = ".nv_fatbin", "__nv_relfatbin"

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

Packed = Iterable[tuple[Path, Path | str]]
"""Files and folders, and their names in the archive."""


def nixl(scratch: Path) -> Packed:
    """The files that NIXL's UCX backend needs."""
    root = unpacked(scratch / "nixl", NIXL)
    return [(path, path.relative_to(root)) for path in needed(root)]


def deepep(scratch: Path) -> Packed:
    """DeepEP V1."""
    root = unpacked(scratch / "deepep", DEEPEP[1])
    return [(path, path.relative_to(root)) for path in stripped(root)]


def deepep_v2(scratch: Path) -> Packed:
    """DeepEP V2 with its NCCL."""
    root = unpacked(scratch / "deepep-v2", DEEPEP[2])
    nccl(root, root / "nccl")
    return [(path, path.relative_to(scratch)) for path in stripped(root)]


def nccl_ep(scratch: Path) -> Packed:
    """NCCL EP with its NCCL."""
    root = scratch / "nccl-ep"
    for name in NCCL_EP:
        unpacked(root / "site", name)
    for folder in LEFT_OUT:
        shutil.rmtree(root / "site" / folder)
    library = nccl(root, root / "home")
    library.with_name("libnccl.so").symlink_to(library.name)
    return [(root, root.name)]


def engines(_: Path) -> Packed:
    """The modules of the engines' published packages that GPU tests import."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "engines"))
    from ends_of_engines import EXPERTS, HERE, site_of

    found: list[tuple[Path, Path | str]] = []
    for engine, package in EXPERTS.items():
        site = site_of(package)
        command = [sys.executable, "-W", "ignore", "-c", IMPORTED, engine, site]
        listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE).stdout
        found += [(path, Path("engines") / path.relative_to(site)) for path in map(Path, listed.splitlines())]
    return found


PACKS: dict[str, Callable[[Path], Packed]] = {
    "nixl": nixl,
    "deepep": deepep,
    "deepep-v2": deepep_v2,
    "nccl-ep": nccl_ep,
    "engines": engines,
}


def main() -> int:
    """Writes the archive."""
    if len(sys.argv) != 3 or sys.argv[1] not in PACKS:
        print(f"usage: pack.py {'|'.join(PACKS)} ARCHIVE.tar.xz", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="crossrail-pack-") as scratch, tarfile.open(sys.argv[2], "w:xz") as archive:
        for path, name in PACKS[sys.argv[1]](Path(scratch)):
            archive.add(path, name)
    return 0


def unpacked(root: Path, name: str, platform: str = PLATFORM) -> Path:
    """The content of a wheel for the GPU machine's Python, in ``root``."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation=cp"]
    with tempfile.TemporaryDirectory(prefix="crossrail-wheel-") as folder:
        target = [f"--python-version={PYTHON}", f"--platform={platform}", f"--dest={folder}"]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options, *target, name]
        subprocess.run(command, check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(root)
    return root


def stripped(root: Path) -> list[Path]:
    """All files in ``root``; its own extension modules lose their symbols."""
    for library in (*root.glob("*.so"), *root.glob("deep_ep/*.so")):
        subprocess.run(["strip", library], check=True)
    return [path for path in sorted(root.rglob("*")) if path.is_file()]


def nccl(root: Path, home: Path) -> Path:
    """Unpacks NCCL into ``home`` with the kernels of one architecture; its library."""
    (unpacked(root, NCCL, NCCL_PLATFORM) / "nvidia" / "nccl").rename(home)
    shutil.rmtree(root / "nvidia")
    library = home / "lib" / "libnccl.so.2"
    slim = bytearray(library.read_bytes())
    keep_one(slim, ARCHITECTURE)
    library.write_bytes(slim)
    return library


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


def keep_one(library: bytearray, architecture: int) -> None:
    """Overwrites the code of all other architectures with zeros, which compress to nothing. Addresses stay."""
    for name, start, length in sections(library):
        if name == SECTION_OF_PARTS:
            library[start : start + length] = bytes(length)
        elif name == SECTIONS_OF_CODE:
            for of, begin, end in entries(library, start, start + length):
                if of != architecture:
                    library[begin:end] = bytes(end - begin)


def sections(elf: bytes | bytearray) -> Iterator[tuple[str, int, int]]:
    """Names, offsets and lengths of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + at * size) for at in range(count)]
    for name, _, _, _, offset, length in headers:
        begin = headers[names][4] + name
        yield elf[begin : elf.index(0, begin)].decode(), offset, length


def entries(library: bytes | bytearray, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The architecture of each entry of the containers from `at` to `end`, and where its code is."""
    while at + 16 <= end:
        magic, _, head, length = struct.unpack_from("<IHHQ", library, at)
        if magic != CONTAINER:
            at += 8  # containers are padded
            continue
        entry, at = at + head, at + head + length
        while entry < at:
            _, own_head, code = struct.unpack_from("<IIQ", library, entry)
            (of,) = struct.unpack_from("<I", library, entry + 28)
            yield of, entry + own_head, entry + own_head + code
            entry += own_head + code


if __name__ == "__main__":
    sys.exit(main())
