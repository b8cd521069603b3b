"""Fetches DeepEP V2 for the GPU machine's Python, and the NCCL that it needs, which is newer than PyTorch's.

python benches/gpu/pack_deepep_v2.py .gpu/deepep-v2.tar.xz

NCCL keeps the kernels of one architecture, which makes it a tenth as large. The archive has one folder, deepep-v2, for
the path of this peer alone: its `deep_ep` is also the name of V1's.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from pack_nixl import fetch

NAME = "tokenspeed-deepep==2.1.0.post20260801"
NCCL = "nvidia-nccl-cu13==2.30.7"
NCCL_PLATFORM = "manylinux_2_18_x86_64"
LIBRARY = "nccl/lib/libnccl.so.2"
ARCHITECTURE = 90
"""Whose kernels NCCL keeps: DeepEP's are compiled for the GPU at hand."""

# A fat binary: containers, one after the other, each with entries for architectures.
CONTAINER = 0xBA55ED50
SECTIONS_OF_CODE, SECTION_OF_PARTS = ".nv_fatbin", "__nv_relfatbin"


def main() -> int:
    """Writes the archive."""
    if len(sys.argv) != 2:
        print("usage: pack_deepep_v2.py ARCHIVE.tar.xz", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="crossrail-deepep-v2-") as scratch:
        root = Path(scratch) / "deepep-v2"
        for name, platform in ((NAME, "manylinux_2_28_x86_64"), (NCCL, NCCL_PLATFORM)):
            wheels = Path(scratch) / name.partition("=")[0]
            with zipfile.ZipFile(fetch(wheels, name, platform)) as wheel:
                wheel.extractall(root)
        (root / "nvidia" / "nccl").rename(root / "nccl")
        for library in root.glob("deep_ep/*.so"):
            subprocess.run(["strip", library], check=True)
        slim = bytearray((root / LIBRARY).read_bytes())
        keep_one(slim, ARCHITECTURE)
        (root / LIBRARY).write_bytes(slim)
        with tarfile.open(sys.argv[1], "w:xz") as archive:
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    archive.add(path, path.relative_to(root.parent))
    return 0


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
