"""Makes a Python for musl, and a wheel of ml_dtypes for it: Debian and PyPI have neither.

Compiled by zig, for any machine, from Debian's sources of Python, zlib and libffi, and from the source distribution of
ml_dtypes. NumPy has wheels for musl. Modules of Debian's security updates, _ssl and the tests are left out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import programs
import repeatable

SOURCES = ("zlib", "libffi")
"""Debian's sources besides Python's, in the order in which they are compiled."""
PLATFORM = "musllinux_1_2"
PREFIX = "python"
"""Of no folder here: the compiler would get the headers that are there, such as those of glibc in /usr/include."""
STATIC = {
    "zlib": ["./configure", "--static"],
    "libffi": ["./configure", "--disable-shared", "--with-pic", "--disable-docs"],
}
STATIC["libffi"] += ["--disable-exec-static-tramp", "--disable-multi-os-directory"]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    """Runs a command, and prints its output only if it fails. Raises CalledProcessError."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        done.check_returncode()


def needs(version: str) -> list[str]:
    """The programs that compile a Python of a version."""
    return [f"python{version}", "make", "readelf"]


def tools(folder: Path, machine: str) -> dict[str, str]:
    """Programs that compile and link for musl, as configure scripts take them. Raises OSError without zig, readelf."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise OSError("no ziglang, of packaging/requirements-wheels.txt")
    zig = Path(found.origin).with_name("zig")
    target = f"-target {machine}-linux-musl"
    made = {"CC": f"cc {target} -dynamic", "CXX": f"c++ {target}", "AR": "ar", "RANLIB": "ranlib"}
    folder.mkdir(parents=True, exist_ok=True)
    # Python's setup.py asks by -v for folders of headers, and would add /usr/include of this machine, of glibc.
    silent = 'case " $* " in *" -v "*) exit 1 ;; esac'
    for name, words in made.items():
        (folder / name).write_text(f'#!/bin/sh\n{silent}\nexec {zig} {words} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    # Python's configure refuses a readelf without a prefix or a path, when it compiles for another system.
    if (readelf := shutil.which("readelf")) is None:
        raise OSError(programs.missing(["readelf"]))
    return {name: str(folder / name) for name in made} | {"READELF": readelf}


def unpacked(sources: Path, package: str, to: Path) -> Path:
    """Unpacks the upstream part of one of Debian's sources; the folder in it."""
    (archive,) = sources.glob(f"{package}_*.orig.tar.*[!c]")
    with tarfile.open(archive) as held:
        held.extractall(to, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
        return to / held.getnames()[0].partition("/")[0]


def python(sources: Path, work: Path, machine: str, version: str, root: Path) -> None:
    """Compiles Python into a root. Raises OSError and CalledProcessError."""
    if said := programs.missing(needs(version)):
        raise OSError(said)
    # A part of the compilation of Python is run by this machine's of the same version.
    here = shutil.which(f"python{version}")
    env = tools(work / "tools", machine)
    # The sources are all in C, and zig would first compile its library of C++.
    del env["CXX"]
    for package in SOURCES:
        source = unpacked(sources, package, work)
        host = [f"--host={machine}-linux-musl"] if package == "libffi" else []
        run(*STATIC[package], *host, f"--prefix={work / 'static'}", cwd=source, env={**env, "CFLAGS": "-O2 -fPIC"})
        run("make", "-j2", "install", cwd=source, env=env)
    # The build machine's C library, not the host's, decides in Python 3.11 whether modules are named *-linux-musl.so.
    # Where they are named *-linux-gnu.so, no wheel's modules are found.
    configured = [f"--build={os.uname().machine}-pc-linux-musl", f"--host={machine}-linux-musl", f"--prefix=/{PREFIX}"]
    configured += [f"--with-build-python={here}", "--without-ensurepip", "--disable-test-modules", "--with-system-ffi"]
    configured += ["--enable-ipv6", "ac_cv_buggy_getaddrinfo=no", "ac_cv_file__dev_ptmx=yes", "ac_cv_file__dev_ptc=no"]
    static = work / "static"
    flags = {"CFLAGS": "-O1 -Wno-date-time", "CPPFLAGS": f"-I{static / 'include'}", "LDFLAGS": f"-L{static / 'lib'}"}
    source = unpacked(sources, f"python{version}", work)
    run("./configure", *configured, cwd=source, env={**env, **flags})
    run("make", "-j2", cwd=source, env=env)
    run("make", f"DESTDIR={root}", "install", cwd=source, env=env)
    (root / "usr" / "bin").mkdir(parents=True, exist_ok=True)
    (root / "usr" / "bin" / f"python{version}").symlink_to(f"/{PREFIX}/bin/python{version}")


def ml_dtypes(work: Path, machine: str, version: str, root: Path, to: Path) -> None:
    """Compiles a wheel of ml_dtypes into the folder ``to``. Raises OSError and CalledProcessError."""
    env = tools(work / "tools", machine)
    tag = f"cp{version.replace('.', '')}"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work]
    chosen = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", version, "--abi", tag]
    run(*fetch, *chosen, "--platform", f"{PLATFORM}_{machine}", "numpy>=2", cwd=work)
    run(*fetch, "--no-binary", "ml_dtypes", "ml_dtypes", cwd=work)
    (numpy,), (archive,) = work.glob("numpy-*.whl"), work.glob("ml_dtypes-*.tar.gz")
    with zipfile.ZipFile(numpy) as wheel:
        wheel.extractall(work / "numpy")
    with tarfile.open(archive) as held:
        held.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source = work / archive.name.removesuffix(".tar.gz")
    include = [source, source / "third_party" / "eigen", root / PREFIX / "include" / f"python{version}"]
    include.append(work / "numpy" / "numpy" / "_core" / "include")
    options = ["-shared", "-fPIC", "-O1", "-std=c++17", "-DEIGEN_MPL2_ONLY", "-fvisibility=hidden", "-ftrapping-math"]
    options += [f"-I{one}" for one in include]
    module = work / "_ml_dtypes_ext.so"
    run(env["CXX"], *options, "-o", module, *sorted((source / "ml_dtypes" / "_src").glob("*.cc")), cwd=source)
    members = {f"ml_dtypes/{path.name}": path.read_bytes() for path in (source / "ml_dtypes").glob("*.py*")}
    members[f"ml_dtypes/{module.name}"] = module.read_bytes()
    name = source.name
    whole = f"{tag}-{tag}-{PLATFORM}_{machine}"
    members[f"{name}.dist-info/METADATA"] = (source / "PKG-INFO").read_bytes()
    members[f"{name}.dist-info/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {whole}\n".encode()
    record = f"{name}.dist-info/RECORD"
    members[record] = b""
    members[record] = repeatable.record(members, record)
    to.mkdir(exist_ok=True)
    with zipfile.ZipFile(to / f"{name}-{whole}.whl", "w") as wheel:
        for path, data in members.items():
            wheel.writestr(path, data)
