"""Makes a release and checks it: everything but the upload, which .github/workflows/release.yml does.

    python packaging/release.py wheels   wheels of all packages, into dist
    python packaging/release.py make     wheels, source distributions, crates, bills of materials, checksums, into dist
    python packaging/release.py c        the archive of the C library for this machine, into dist
    python packaging/release.py check    each of them installed and tried, by every Python that there is
    python packaging/release.py crates   the crates in the order in which they are published

What this machine cannot make or try is listed as not done at the end; with --complete that is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import bills
import musl
import nccl_plugin
import programs
import roots

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TARGETS = (
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-unknown-linux-musl",
    "aarch64-unknown-linux-musl",
)
NATIVE = "native"
OLDEST, NEWEST, WITHOUT_GIL = 10, 15, 13
"""Minor versions of Python 3 that are tried, and the first that can be built without a GIL."""
C_MACHINES = ("x86_64", "aarch64")
GLIBC = nccl_plugin.GLIBC
"""The oldest glibc that wheels and the C library run with, if zig links them."""
C_EXAMPLES = ROOT / "examples" / "c"
SMOKE = ROOT / "packaging" / "smoke.py"
SUMS = "SHA256SUMS"
CLEAN = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONDONTWRITEBYTECODE": ""}
"""Settings of a Python that is tried. Where bytecode is not kept, each process in a root compiles what it imports, and
by qemu starts in twice the time."""


class Failed(Exception):
    """A step that failed; the text is for people."""


@dataclass
class Report:
    """Completed steps, and the others with their reasons."""

    done: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def print(self) -> None:
        """Prints both, one line each."""
        for line in self.done:
            print(f"done      {line}")
        for line in self.missing:
            print(f"NOT DONE  {line}")


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT, limit_s: float = 3600) -> str:
    """Runs a command, and returns what it prints. Raises Failed with the end of its output."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(programs.missing([str(command[0])]) or f"{command[0]}: {error}") from None
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def version() -> str:
    """The version of the workspace: of all artefacts but crossrail-nixl, which has NIXL's."""
    found = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise Failed("Cargo.toml has no version")
    return found[1]


# What is made.


def make(chosen: Sequence[str], beside: Path | None, report: Report) -> None:
    """Makes everything into an empty dist; the files of ``beside`` were made on other machines."""
    shutil.rmtree(DIST, ignore_errors=True)
    make_wheels(chosen, report)
    make_sources(report)
    make_crates(report)
    make_c_library(report)
    add_made_elsewhere(beside, report)
    for path in bills.write(DIST, version()):
        report.done.append(path.name)
    write_sums(report)


def write_sums(report: Report) -> None:
    """Writes the SHA-256 of every file."""
    files = sorted(path for path in DIST.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (DIST / SUMS).write_text("".join(lines), encoding="utf-8")
    report.done.append(f"{SUMS} of {len(files)} files")


def make_wheels(chosen: Sequence[str], report: Report) -> None:
    """Makes the wheels of all packages."""
    DIST.mkdir(exist_ok=True)
    for target in chosen:
        make_wheel(target, report)
    for package in packages():
        add_wheel([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", package], {}, report)


def packages() -> list[Path]:
    """The packages that own another project's module."""
    return sorted((ROOT / "packages").iterdir())


def make_wheel(target: str, report: Report) -> None:
    """Makes the wheel of a target; not if the target's standard library cannot be had."""
    if target == NATIVE:
        run(sys.executable, "packaging/nccl_plugin.py")
        return add_wheel(["maturin", "build", "--release", "--locked"], {}, report)
    sysroot = Path(run("rustc", "--print", "sysroot").strip())
    library = Path(run("rustc", "--print", "target-libdir", "--target", target).strip())
    if not library.is_dir():
        with contextlib.suppress(Failed):
            run("rustup", "--quiet", "target", "add", target, limit_s=300)
    # Reproducible: the same bytes from any folder and home directory.
    renamed = {ROOT: "/crossrail", Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")): "/cargo"}
    renamed[sysroot] = "/rust"
    env = {"RUSTFLAGS": " ".join(f"--remap-path-prefix={old}={new}" for old, new in renamed.items())}
    if not library.is_dir():
        if not (sysroot / "lib" / "rustlib" / "src" / "rust" / "library").is_dir():
            without = "there is neither its standard library here nor the source of it"
            report.missing.append(f"wheel for {target}: {without} ({library_of(target)})")
            return None
        env |= {"RUSTC_BOOTSTRAP": "1", "CARGO_UNSTABLE_BUILD_STD": "std,panic_unwind"}
        report.done.append(f"standard library for {target}: compiled from its source")
    command = ["maturin", "build", "--release", "--locked", "--zig", "--target", target]
    if not target.endswith("-musl"):
        command += ["--compatibility", f"manylinux_{GLIBC.replace('.', '_')}"]
        run(sys.executable, "packaging/nccl_plugin.py", "--zig", target, env=env)
        return add_wheel(command, env, report)
    # NCCL exists for glibc only: meanwhile the plugin of this machine is outside the package, of which all is taken.
    plugin, aside = nccl_plugin.LIBRARY, DIST / f"{nccl_plugin.LIBRARY.name}.aside"
    with contextlib.suppress(FileNotFoundError):
        shutil.move(plugin, aside)
    try:
        return add_wheel(command, env, report)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.move(aside, plugin)


def library_of(target: str) -> str:
    """Ways to get the standard library of a target, or its source."""
    machine, _, libc = target.partition("-unknown-linux-")
    of_debian = "rust-web-src" if libc == "musl" else f"libstd-rust-web-dev:{roots.DEBIAN[machine]}"
    return f"rustup target add {target}; Debian: {of_debian}, with the compiler of rustc-web"


def add_wheel(command: Sequence[str | Path], env: dict[str, str], report: Report) -> None:
    """Runs a command that makes a wheel, and moves the wheel into dist."""
    with tempfile.TemporaryDirectory(dir=DIST) as folder:
        run(*command, "--wheel-dir" if "pip" in command else "--out", folder, env=env)
        (made,) = Path(folder).glob("*.whl")
        run(sys.executable, "packaging/repeatable.py", made)
        made.replace(DIST / made.name)
    report.done.append(made.name)


def make_sources(report: Report) -> None:
    """Makes the source distributions."""
    run("maturin", "sdist", "--out", DIST)
    report.done.append(f"crossrail-{version()}.tar.gz")
    for package in packages():
        code = f"import flit_core.buildapi as build; print(build.build_sdist({str(DIST)!r}))"
        report.done += run(sys.executable, "-c", code, cwd=package).split()


def make_crates(report: Report) -> None:
    """Packages the crates, each with the versions of the others in this release."""
    names = crates()
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release-crates"
    chosen = [word for name in names for word in ("--package", name)]
    run("cargo", "package", "--quiet", "--locked", "--no-verify", "--allow-dirty", "--target-dir", folder, *chosen)
    for name in names:
        crate = folder / "package" / f"{name}-{version()}.crate"
        shutil.copy2(crate, DIST)
        report.done.append(crate.name)


def crates() -> list[str]:
    """The crates that are published, dependencies first."""
    listed = json.loads(run("cargo", "metadata", "--no-deps", "--format-version", "1", "--locked"))["packages"]
    published = {one["name"]: one for one in listed if one["publish"] != []}
    needs = {
        name: {
            dep["name"] for dep in one["dependencies"] if dep["kind"] != "dev" and dep["name"].startswith("crossrail")
        }
        for name, one in published.items()
    }
    for name, needed in needs.items():
        if needed - needs.keys():
            raise Failed(f"{name} depends on crates that are not published: {', '.join(sorted(needed - needs.keys()))}")
    ordered: list[str] = []
    while len(ordered) < len(needs):
        ready = sorted(name for name, needed in needs.items() if name not in ordered and needed <= set(ordered))
        if not ready:
            raise Failed("the crates depend on each other in a circle")
        ordered += ready
    return ordered


def make_c_library(report: Report) -> None:
    """Makes the archive of the C library for this machine, from what `make install-c` installs."""
    DIST.mkdir(exist_ok=True)
    machine = os.uname().machine
    by_zig = importlib.util.find_spec("ziglang") is not None
    target = f"{machine}-linux-gnu.{GLIBC}"
    env = {"CC": f"{sys.executable} -m ziglang cc -target {target}"} if by_zig else {}
    with tempfile.TemporaryDirectory() as folder:
        run("make", "install-c", f"DESTDIR={folder}", "PREFIX=/usr", env=env)
        needed = newest_glibc(Path(folder) / "usr" / "lib" / "libcrossrail.so")
        name = c_archive(machine)
        with tarfile.open(DIST / name, "w:gz") as archive:
            archive.add(Path(folder) / "usr", arcname=name.removesuffix(".tar.gz"))
    report.done.append(f"{name}: for glibc {'.'.join(map(str, needed))} and later")
    if needed > tuple(map(int, GLIBC.split("."))):
        report.missing.append(f"{name} for glibc {GLIBC}: it needs {'.'.join(map(str, needed))}; ziglang links it")


def c_archive(machine: str) -> str:
    """The name of the C library's archive for a kind of machine."""
    return f"crossrail-c-{version()}-{machine}-linux-gnu.tar.gz"


def newest_glibc(library: Path) -> tuple[int, ...]:
    """The newest version of glibc's symbols that a library uses."""
    versions = re.findall(r"GLIBC_([0-9.]+)", run("readelf", "--version-info", "--wide", library))
    return max(tuple(map(int, one.split("."))) for one in versions)


def add_made_elsewhere(beside: Path | None, report: Report) -> None:
    """Adds the C library's archives of other machines."""
    for machine in set(C_MACHINES) - {os.uname().machine}:
        name = c_archive(machine)
        if beside is None or not (beside / name).is_file():
            report.missing.append(f"{name}: made on such a machine, by `release.py c`")
            continue
        shutil.copy2(beside / name, DIST)
        report.done.append(name)


# What is checked.


def pythons() -> Iterator[tuple[str, Path]]:
    """Each Python from 3.10 on, its name and its path, which is empty if there is none; also those without a GIL."""
    for minor in range(OLDEST, NEWEST + 1):
        for suffix in ("", "t") if minor >= WITHOUT_GIL else ("",):
            name = f"python3.{minor}{suffix}"
            places = [shutil.which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*{suffix}/bin/{name}")]
            for place in filter(None, places):
                if subprocess.run([place, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
                    yield name, Path(place)
                    break
            else:
                yield name, Path()


def check(report: Report, only: str | None, with_sources: bool, folder: Path | None) -> None:
    """Installs each artefact into an environment of its own, and tries it. ``folder``: of packaging/roots.py."""
    check_sums(report)
    check_contents(report)
    check_bills(report)
    check_c_library(report)
    wheels = sorted(DIST.glob(f"crossrail-{version()}-*.whl"))
    libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    native = [one for one in wheels if os.uname().machine in one.name and libc in one.name]
    if not native:
        raise Failed("dist has no wheel for this machine")
    for target in TARGETS:
        machine, musl_target = target.partition("-")[0], target.endswith("-musl")
        if not any(machine in one.name and ("musllinux" in one.name) is musl_target for one in wheels):
            report.missing.append(f"wheel for {target} tried: dist has none")
    beside = sorted(DIST.glob("crossrail_*.whl"))
    there = [root.absolute() for root in sorted(folder.iterdir()) if root.name in roots.ROOTS] if folder else []
    entered: dict[str, set[str]] = {}
    for wheel in wheels:
        tried_in = [root for root in there if root.name.startswith(root_of(wheel))]
        entered[wheel.name] = {name_of(root) for root in tried_in if check_root(root, wheel, beside, report)}
        left = [name for name in names() if name not in entered[wheel.name]]
        if wheel not in native and left:
            report.missing.append(f"{wheel.name} by {', '.join(left)}: no {root_of(wheel)}* of packaging/roots.py")
    for name, python in pythons():
        if only is not None and name != only:
            continue
        if python == Path():
            if name not in entered[native[0].name] or only is not None:
                report.missing.append(f"{native[0].name} by {name}: not on this machine")
        elif name.endswith("t"):
            refused(python, native[0], report)
        else:
            tried(name, python, [native[0]], beside, report)
    if with_sources:
        check_crates(report)
        packages = sorted(DIST.glob("crossrail_*.tar.gz"))
        sdist = DIST / f"crossrail-{version()}.tar.gz"
        tried("source distributions by this Python", Path(sys.executable), [sdist], packages, report)
    else:
        report.missing.append("crates and source distributions compiled: left out by --no-sources")


def names() -> list[str]:
    """Names of the Pythons that install wheels."""
    return [f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1)]


def name_of(root: Path) -> str:
    """The name of the Python of a root."""
    return f"python{root.name.rpartition('-')[2]}"


def tried(name: str, python: Path, first: Sequence[Path], beside: Sequence[Path], report: Report) -> None:
    """Installs ``first``, and each of ``beside`` after it, and runs packaging/smoke.py."""
    with tempfile.TemporaryDirectory() as folder:
        clean = CLEAN | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        run(python, "-m", "venv", folder)
        inside = Path(folder) / "bin" / "python"
        run(inside, "-m", "pip", "install", "--quiet", *first, env=clean)
        modules = [name for package in beside for name in bills.modules(package)]
        if beside:
            run(inside, "-m", "pip", "install", "--quiet", "--no-deps", *beside, env=clean)
        said = run(inside, SMOKE, version(), *modules, env=clean, cwd=Path(folder), limit_s=300)
        report.done.append(f"{name}: {' '.join(one.name for one in first)}: {said.strip().splitlines()[-1]}")


def check_root(root: Path, wheel: Path, beside: Sequence[Path], report: Report) -> bool:
    """Tries a wheel in a root of packaging/roots.py; False if nothing here can run programs of the root."""
    try:
        inside = roots.enter(root)
    except OSError as error:
        report.missing.append(f"{root.name}: {wheel.name}: {error}")
        return False
    shutil.rmtree(root / "try", ignore_errors=True)
    wheels = root / "try" / "wheels"
    wheels.mkdir(parents=True)
    fetch_for(root, wheel, wheels)
    for path in (SMOKE, *beside):
        shutil.copy2(path, wheels)
    (pip,) = (f"/try/wheels/{path.name}/pip" for path in wheels.glob("pip-*.whl"))
    run(*inside, "-m", "venv", "--without-pip", "/try/env", env=CLEAN)
    inside[-1] = "/try/env/bin/python"
    install = [*inside, pip, "install", "--quiet", "--no-index", "--find-links", "/try/wheels"]
    run(*install, f"/try/wheels/{wheel.name}", env=CLEAN)
    run(*install, "--no-deps", *(f"/try/wheels/{one.name}" for one in beside), env=CLEAN)
    modules = [name for package in beside for name in bills.modules(package)]
    said = run(*inside, f"/try/wheels/{SMOKE.name}", version(), *modules, env=CLEAN, limit_s=900)
    report.done.append(f"{root.name}: {wheel.name}: {said.strip().splitlines()[-1]}")
    return True


def root_of(wheel: Path) -> str:
    """The first part of the names of roots for a wheel, such as ``aarch64-musl-``."""
    tag = wheel.stem.rpartition("-")[2]
    return f"{re.sub('^[a-z]+_[0-9]+_[0-9]+_', '', tag)}-{'musl' if 'musl' in tag else 'gnu'}-"


def fetch_for(root: Path, wheel: Path, to: Path) -> None:
    """Fetches pip, and what a wheel requires, for a root, which needs no network and no OpenSSL then."""
    machine, libc, python = root.name.split("-")
    tags = [f"{musl.PLATFORM}_{machine}"] if libc == "musl" else [f"manylinux_2_{at}_{machine}" for at in (28, 27, 17)]
    options = ["--platform", wheel.stem.rpartition("-")[2], "--find-links", str(root.parent / roots.WHEELS)]
    options += [word for tag in tags for word in ("--platform", tag)]
    options += [word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
    options += ["--implementation", "cp", "--python-version", python]
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(to)]
    run(*fetch, *options, wheel)
    run(*fetch, "--no-deps", "pip")


def refused(python: Path, wheel: Path, report: Report) -> None:
    """A Python without a GIL must not install the wheel: a rule of CONTRIBUTING.md."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        inside = Path(folder) / "bin" / "python"
        try:
            run(inside, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
        except Failed:
            report.done.append(f"{python.name}: refuses {wheel.name}")
        else:
            raise Failed(f"{python} has installed {wheel.name}, though it has no GIL")


def check_sums(report: Report) -> None:
    """The sums are those of the files, and every file has one."""
    lines = (DIST / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {path.name for path in DIST.iterdir() if path.name != SUMS}
    wrong = [name for name in sums if hashlib.sha256((DIST / name).read_bytes()).hexdigest() != sums[name]]
    if wrong or set(sums) != there:
        raise Failed(f"{SUMS}: {', '.join([*wrong, *sorted(set(sums) ^ there)])}")
    report.done.append(f"{SUMS}: {len(sums)} files are as they were made")


def check_contents(report: Report) -> None:
    """Source distributions have what a build needs; wheels have types, man page and bills, for glibc the plugin."""
    with tarfile.open(DIST / f"crossrail-{version()}.tar.gz") as sources:
        held = sources.getnames()
    for needed in ("share/man/man1/crossrail.1", "packaging/nccl_plugin.py", "/Cargo.lock", "/LICENSE"):
        if not any(name.endswith(needed) for name in held):
            raise Failed(f"the source distribution lacks {needed}")
    for wheel in sorted(DIST.glob(f"crossrail-{version()}-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        wanted = ["crossrail/py.typed", "crossrail/_native.pyi", "share/man/man1/crossrail.1", ".cyclonedx.json"]
        wanted += [] if "musl" in wheel.name else ["crossrail/libnccl-net-crossrail.so"]
        missing = [one for one in wanted if not any(name.endswith(one) for name in names)]
        libraries = {name for name in names if name.startswith("crossrail/lib")} - set(wanted)
        if libraries:
            raise Failed(f"{wheel.name} has {', '.join(sorted(libraries))}")
        if missing:
            raise Failed(f"{wheel.name} lacks {', '.join(missing)}")
        if "musl" not in wheel.name and (found := unversioned(wheel)):
            raise Failed(f"{wheel.name} needs a newer glibc than it was linked against: {', '.join(found)}")
        report.done.append(f"{wheel.name}: {len(names)} files, with types, man page and bill of materials")


def check_bills(report: Report) -> None:
    """Bills of materials meet CycloneDX's schema, and that of Python lists every wheel with its SHA-256."""
    held = {}
    for language in ("rust", "python"):
        text = (DIST / f"crossrail-{version()}-{language}.cdx.json").read_text(encoding="utf-8")
        held[language] = json.loads(text)
        if importlib.util.find_spec("cyclonedx") is None:
            report.missing.append(f"the {language} bill of materials against its schema: no cyclonedx-python-lib here")
            continue
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator

        if error := JsonStrictValidator(SchemaVersion.V1_5).validate_str(text):
            raise Failed(f"the {language} bill of materials: {error}")
    sums = {one["content"] for part in held["python"]["components"] for one in part.get("hashes", [])}
    for wheel in DIST.glob("*.whl"):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in sums:
            raise Failed(f"the Python bill of materials lacks {wheel.name} as it is here")
    counts = " and ".join(f"{len(bill['components'])} of {language}" for language, bill in held.items())
    report.done.append(f"bills of materials: {counts}")


def check_c_library(report: Report) -> None:
    """Compiles the examples against the archive of this machine alone, and lets both ends meet."""
    for machine in set(C_MACHINES) - {os.uname().machine}:
        if (DIST / c_archive(machine)).exists():
            report.missing.append(f"{c_archive(machine)} tried: it is for another machine")
    name = c_archive(os.uname().machine)
    compilers = ("cc", "c++")
    without = "this system has another C library than glibc" if platform.libc_ver()[0] != "glibc" else ""
    if without := without or programs.missing(compilers):
        report.missing.append(f"{name} tried: {without}")
        return
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(DIST / name) as archive:
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        prefix = Path(folder) / name.removesuffix(".tar.gz")
        lib = prefix / "lib"
        ends = []
        for compiler, language in zip(compilers, ("c", "cpp"), strict=True):
            program = Path(folder) / language
            source = C_EXAMPLES / f"two_processes.{language}"
            built = [compiler, source, "-o", program, f"-I{prefix / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
            run(*built, "-lcrossrail")
            ends.append(program)
        static = Path(folder) / "static"
        private = re.search(r"^Libs.private: (.*)$", (lib / "pkgconfig" / "crossrail.pc").read_text(), re.MULTILINE)
        libraries = [str(lib / "libcrossrail.a"), *(private[1].split() if private else [])]
        run(compilers[0], C_EXAMPLES / "two_processes.c", "-o", static, f"-I{prefix / 'include'}", *libraries)
        for one, other in ((ends[0], ends[1]), (static, ends[0])):
            said = run_both_ends(one, other)
        ranks = Path(folder) / "experts"
        run(compilers[0], C_EXAMPLES / "experts.c", "-o", ranks, *built[4:], "-lcrossrail")
        run(ranks, limit_s=120)
    report.done.append(f"{name}: examples in C and C++, linked with each library: {said}; four ranks of experts")


def check_crates(report: Report) -> None:
    """Compiles a program against the archives of the crates, as if they were published, and runs it."""
    names = crates()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in names:
            with tarfile.open(DIST / f"{name}-{version()}.crate") as archive:
                archive.extractall(root, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        lines = ["[package]", 'name = "tried"', 'edition = "2024"', "[dependencies]"]
        lines += [f'{name} = "={version()}"' for name in names]
        lines += ["[patch.crates-io]", *(f'{name} = {{ path = "{name}-{version()}" }}' for name in names)]
        (root / "Cargo.toml").write_text("\n".join(lines), encoding="utf-8")
        (root / "src").mkdir()
        shutil.copy2(ROOT / "crates" / "engine" / "examples" / "hotpath.rs", root / "src" / "main.rs")
        shutil.copy2(ROOT / "Cargo.lock", root)
        target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release-crates"
        said = run("cargo", "run", "--quiet", "--target-dir", target, "--", "1000", "shm", cwd=root)
    report.done.append(f"{len(names)} crates: a program compiled from their archives: {said.strip()}")


def run_both_ends(listener: Path, connector: Path) -> str:
    """Runs the two ends of an example; what the listener prints about the message."""
    with subprocess.Popen([listener, "listen"], stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            address = listening.stdout.readline().split()[-1]
            run(connector, "connect", address, limit_s=60)
            said, _ = listening.communicate(timeout=60)
        finally:
            listening.kill()
    if listening.returncode:
        raise Failed(f"{listener} listen: exit code {listening.returncode}")
    return said.strip()


def unversioned(wheel: Path) -> list[str]:
    """Functions that libraries of a wheel need from no version of a library.

    The linker leaves them so where its glibc has none of that name, and so may the system that loads it. Python's have
    no version.
    """
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                symbols = run("readelf", "--dyn-syms", "--wide", archive.extract(name, folder))
                needed = re.findall(r"\bGLOBAL +DEFAULT +UND (\w+)$", symbols, re.MULTILINE)
                found |= {one for one in needed if not re.match("_?Py", one)}
    return sorted(found)


def main() -> int:
    """Runs what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("what", choices=["wheels", "make", "c", "check", "crates"])
    parser.add_argument(
        "--targets",
        default=",".join(TARGETS),
        help="those whose wheels are made; `native`: for this machine alone, without zig",
    )
    parser.add_argument("--beside", type=Path, metavar="DIR", help="archives that other machines have made (make)")
    parser.add_argument("--only", metavar="PYTHON", help="try this Python alone, such as python3.12")
    parser.add_argument("--no-sources", action="store_true", help="do not build from the source distribution")
    parser.add_argument(
        "--roots", type=Path, metavar="DIR", help="try other machines' wheels there (packaging/roots.py)"
    )
    parser.add_argument("--complete", action="store_true", help="fail if something is not done")
    given = parser.parse_args()
    report = Report()
    try:
        if given.what == "crates":
            print("\n".join(crates()))
        elif given.what == "wheels":
            make_wheels(given.targets.split(","), report)
        elif given.what == "make":
            make(given.targets.split(","), given.beside, report)
        elif given.what == "c":
            make_c_library(report)
        else:
            check(report, given.only, not given.no_sources, given.roots)
            print("Not part of a check: provenance and the upload, which are release.yml's")
    except Failed as error:
        report.print()
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.print()
    return 1 if report.missing and given.complete else 0


if __name__ == "__main__":
    sys.exit(main())
