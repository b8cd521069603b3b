"""Makes root file systems with a Python of another version or machine, in which release.py tries wheels.

    python packaging/roots.py FOLDER [ROOT...]    ROOT: one of ROOTS, such as aarch64-gnu-3.11 (all of them)

Of Debian's packages, by apt with the keys of its archive; nothing is installed on this machine. Programs run in them by
proot, those of another machine by qemu. Debian has no Python for musl: packaging/musl.py compiles it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import musl
import programs

ROOTS = (
    "x86_64-gnu-3.14",
    "x86_64-gnu-3.15",
    "aarch64-gnu-3.11",
    "aarch64-gnu-3.15",
    "x86_64-musl-3.11",
    "aarch64-musl-3.11",
)
"""Machine, C library, Python."""
SUITES = {"3.11": "bookworm", "3.14": "forky", "3.15": "sid"}
"""Of Debian, by the Python in each."""
MUSL_SUITE = "trixie"
"""Of musl 1.2.5: libraries in NumPy's wheels have packed relative relocations (RELR), which 1.2.3 does not apply."""
DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}
SYSTEM = ("bash", "coreutils", "libstdc++6", "libatomic1")
WHEELS = "wheels"
"""Folder next to the roots with wheels that no index has."""
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
"""Debian's packages for this machine, whose suite is replaced."""
APT = """Dir::State "{state}/state";
Dir::State::status "{state}/status";
Dir::Cache "{state}/cache";
Dir::Etc::sourcelist "{state}/debian.sources";
Dir::Etc::sourceparts "-";
APT::Sandbox::User "root";
APT::Architecture "{arch}";
APT::Architectures {{ "{arch}"; }};
"""


def runs(machine: str) -> list[str]:
    """The programs that run those of a machine in a root."""
    return ["proot"] if machine == os.uname().machine else ["proot", f"qemu-{machine}-static"]


def needs(name: str) -> list[str]:
    """The programs that make a root, and run its Python."""
    machine, libc, version = name.split("-")
    return ["apt-get", "dpkg", *(musl.needs(version) if libc == "musl" else []), *runs(machine)]


def enter(root: Path) -> list[str]:
    """The words that run the Python of a root. Raises OSError where a program for it is missing."""
    machine, _, python = root.name.split("-")
    if said := programs.missing(runs(machine)):
        raise OSError(said)
    words = f"{' -q '.join(runs(machine))} -r {root} -b /proc -b /dev -w / /usr/bin/python{python}"
    return words.split(" ")


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Runs a command. Raises CalledProcessError."""
    subprocess.run([str(word) for word in command], cwd=cwd, env={**os.environ, **(env or {})}, check=True)


def apt(state: Path, machine: str, suite: str) -> dict[str, str]:
    """The environment in which apt knows the packages of a machine, and nothing of this system. Raises OSError."""
    if not SOURCES.is_file():
        raise OSError(f"no {SOURCES}, which has the address of Debian's packages (Debian 13: apt modernize-sources)")
    for needed in ("state/lists/partial", "cache/archives/partial"):
        (state / needed).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    first = SOURCES.read_text(encoding="utf-8").strip().partition("\n\n")[0]
    entry = re.sub("^Suites: .*$", f"Suites: {suite}", first, flags=re.MULTILINE)
    entry = re.sub("^Types: .*$", "Types: deb deb-src", entry, flags=re.MULTILINE)
    (state / "debian.sources").write_text(f"{entry}\n", encoding="utf-8")
    (state / "apt.conf").write_text(APT.format(state=state, arch=DEBIAN[machine]), encoding="utf-8")
    env = {"APT_CONFIG": str(state / "apt.conf")}
    run("apt-get", "--quiet", "--quiet", "update", env=env)
    return env


def unpack(state: Path, env: dict[str, str], packages: list[str], root: Path) -> None:
    """Unpacks Debian's packages, and those that they need, into a root."""
    options = ["--yes", "--quiet", "--quiet", "--download-only", "--no-install-recommends"]
    run("apt-get", "install", *options, *packages, env=env)
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        run("dpkg", "--extract", package, root)


def make(folder: Path, name: str) -> None:
    """Makes a root, unless it is there. Raises OSError and CalledProcessError."""
    machine, libc, version = name.split("-")
    root, new, state = folder / name, folder / f"new-{name}", folder / f"apt-{name}"
    if root.is_dir():
        return answer(root)
    shutil.rmtree(new, ignore_errors=True)
    (new / "tmp").mkdir(parents=True)
    env = apt(state, machine, MUSL_SUITE if libc == "musl" else SUITES[version])
    if libc == "musl":
        (new / "lib").symlink_to("usr/lib")
        unpack(state, env, ["musl"], new)
        env = apt(state, machine, SUITES[version])
        sources = ["apt-get", "source", "--quiet", "--quiet", "--download-only"]
        run(*sources, f"python{version}", *musl.SOURCES, cwd=state, env=env)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            musl.python(state, Path(work), machine, version, new)
            musl.ml_dtypes(Path(work), machine, version, new, folder / WHEELS)
    else:
        unpack(state, env, [f"python{version}", *SYSTEM], new)
    new.rename(root)
    return answer(root)


def answer(root: Path) -> None:
    """Runs the Python of a root, which prints its machine and version. Raises OSError and CalledProcessError."""
    run(*enter(root), "-c", "import ctypes, platform, zlib; print(platform.uname().machine, platform.python_version())")


def main() -> int:
    """Makes those asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("roots", nargs="*", metavar="ROOT", help=", ".join(ROOTS))
    given = parser.parse_args()
    chosen = given.roots or ROOTS
    try:
        # Before anything is fetched and compiled, which takes minutes.
        if said := programs.missing(program for name in chosen for program in needs(name)):
            raise OSError(said)
        for name in chosen:
            make(given.folder.absolute(), name)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"roots.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
