"""Builds and installs the C library: libcrossrail, its headers, and what pkg-config and CMake find it by.

python packaging/c_library.py --prefix /usr/local [--destdir DIR] [--libdir lib]    as it is released
python packaging/c_library.py --prefix DIR --as-tested                               as tests use it: less optimized

The shared library is linked here, from the static one: a version script has no effect on a cdylib. It exports what
crates/capi/crossrail.map lists, and nothing else. So does the static library, which is one object with all other names
local: two Rust libraries in a program would clash otherwise.
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

import programs

ROOT = Path(__file__).parents[1]
CRATE = ROOT / "crates" / "capi"
LIBRARIES = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"
"""As rustc --print native-static-libs lists them."""


def version() -> str:
    """The version of the workspace."""
    found = re.search(r'^version = "([0-9.]+)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("Cargo.toml has no version")
    return found[1]


def soname(of: str) -> str:
    """The name that programs are linked with: it changes with every break."""
    return f"libcrossrail.so.{of.partition('.')[0]}"


def exported() -> list[str]:
    """The names that the library exports, in the order of its version script."""
    return re.findall(r"^\s+(xrail_\w+);$", (CRATE / "crossrail.map").read_text(), re.MULTILINE)


def compile_crate(as_tested: bool) -> Path:
    """Builds the static library of the crate. Raises CalledProcessError."""
    command = ["cargo", "build", "--quiet", "--locked"]
    # With the packages and features of `make test-rust`, so that both compile everything once.
    tested = ["--profile", "test", "--workspace", "--exclude", "crossrail-python"]
    tested += ["--features", "crossrail/simulated-gpu", "--lib", "--example", "two_processes"]
    released = ["--release", "--package", "crossrail-capi"]
    subprocess.run([*command, *(tested if as_tested else released)], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / ("debug" if as_tested else "release") / "libcrossrail_capi.a"


def link_shared(archive: Path, to: Path) -> None:
    """Links the shared library with its version script. Raises CalledProcessError."""
    options = [f"-Wl,-soname,{soname(version())}", f"-Wl,--version-script={CRATE / 'crossrail.map'}"]
    # Never unloaded: it has threads, and a handler of fork.
    options += ["-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,defs", "-Wl,--gc-sections", "-Wl,-Bsymbolic"]
    whole = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive"]
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-shared", "-o", str(to), *options, *whole, *LIBRARIES.split()], check=True)


def link_static(archive: Path, to: Path) -> None:
    """Makes the static library: one object that shows the exported names alone. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        whole, names = Path(folder) / "crossrail.o", Path(folder) / "exported"
        names.write_text("".join(f"{name}\n" for name in exported()))
        roots = [option for name in exported() for option in ("-u", name)]
        subprocess.run(["ld", "-r", "--gc-sections", *roots, "-o", str(whole), str(archive)], check=True)
        # Bitcode of several objects, joined, is none: tools that look at it fail.
        unused = ["--remove-section=.llvmbc", "--remove-section=.llvmcmd", "--strip-debug"]
        subprocess.run(["objcopy", *unused, f"--keep-global-symbols={names}", str(whole)], check=True)
        to.unlink(missing_ok=True)
        subprocess.run(["ar", "rcs", str(to), str(whole)], check=True)


def install(archive: Path, prefix: Path, destdir: str, libdir: str) -> None:
    """Links both libraries, and puts them and all other files in place. Raises CalledProcessError and OSError."""
    root = Path(destdir + str(prefix)) if destdir else prefix
    libraries, headers = root / libdir, root / "include"
    config = libraries / "cmake" / "Crossrail"
    for folder in (headers, config, libraries / "pkgconfig"):
        folder.mkdir(parents=True, exist_ok=True)
    full, name = f"libcrossrail.so.{version()}", soname(version())
    # Replaced in one step: a running program may have the old one loaded.
    link_shared(archive, libraries / f"{full}.new")
    (libraries / f"{full}.new").replace(libraries / full)
    link_static(archive, libraries / "libcrossrail.a")
    for link, to in ((name, full), ("libcrossrail.so", name)):
        (libraries / link).unlink(missing_ok=True)
        (libraries / link).symlink_to(to)
    for header in sorted((CRATE / "include").iterdir()):
        shutil.copyfile(header, headers / header.name)
    values = {"VERSION": version(), "MAJOR": version().partition(".")[0], "SONAME": name, "LIBDIR": libdir}
    values["PRIVATE"] = LIBRARIES
    for template, to_folder in (
        (CRATE / "crossrail.pc.in", libraries / "pkgconfig"),
        (CRATE / "cmake" / "CrossrailConfig.cmake.in", config),
        (CRATE / "cmake" / "CrossrailConfigVersion.cmake.in", config),
    ):
        # Relocatable: each file finds the prefix from where it lies.
        filled = {**values, "UP": os.path.relpath(root, to_folder)}
        text = template.read_text()
        for key, value in filled.items():
            text = text.replace(f"@{key}@", value)
        (to_folder / template.name.removesuffix(".in")).write_text(text)


def main() -> int:
    """Builds and installs; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--prefix", type=Path, required=True, help="where it is installed")
    parser.add_argument("--destdir", default="", help="a folder to put before the prefix, for packagers")
    parser.add_argument("--libdir", default="lib", help="below the prefix, as lib/x86_64-linux-gnu (lib)")
    parser.add_argument("--as-tested", action="store_true", help="as `make test` builds Rust")
    given = parser.parse_args()
    try:
        # Before the crate is compiled, which takes minutes.
        if said := programs.missing([os.environ.get("CC", "cc").split()[0], "ld", "objcopy", "ar"]):
            raise OSError(said)
        archive = compile_crate(given.as_tested)
        install(archive, given.prefix.absolute(), given.destdir, given.libdir)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except OSError as error:
        print(f"c_library.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
