"""The C library as tests use it: installed once per run, the headers read, programs compiled against it."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES, EXAMPLES = ROOT / "tests" / "capi", ROOT / "examples" / "c"
HEADERS = [ROOT / "crates" / "capi" / "include" / name for name in ("crossrail.h", "crossrail_experts.h")]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
C_COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
CXX_COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]


@functools.cache
def installed() -> Path:
    """The prefix of an installation of the library as `make test-rust` compiles it, or C_LIBRARY."""
    if given := os.environ.get("C_LIBRARY"):
        return Path(given)
    prefix = TARGET / "c-library"
    prefix.mkdir(parents=True, exist_ok=True)
    with (prefix / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, str(ROOT / "packaging" / "c_library.py"), "--as-tested", "--prefix", str(prefix)]
        subprocess.run(command, check=True, env=os.environ | {"CARGO_TARGET_DIR": str(TARGET)})
    return prefix


def build(source: Path, to: Path, compiler: str = "gcc", *options: str) -> Path:
    """Compiles a program as strictly as users may, against the installed library."""
    lib = installed() / "lib"
    is_cxx = compiler.endswith("++")
    language = ["-x", "c++", "-std=c++17"] if is_cxx else ["-std=c11"]
    command = [compiler, *language, *STRICT, "-O1", "-g", *options, f"-I{installed() / 'include'}", str(source)]
    command += ["-x", "none"] if is_cxx else []
    command += ["-o", str(to), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lcrossrail", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to


def checks() -> list[tuple[str, str]]:
    """Programs in tests/capi and their parts: `checks.c messages`."""
    found = []
    for program in ("checks.c", "misuse.c", "experts.c", "experts_misuse.c"):
        parts = re.findall(r'\{"(\w+)", \1\}', (SOURCES / program).read_text())
        found += [(program, part) for part in parts]
    return found


def declarations() -> str:
    """The headers without their comments."""
    text = "".join(header.read_text() for header in HEADERS)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def functions() -> dict[str, tuple[str, list[str]]]:
    """Each function's result and the types of its arguments, as the headers declare them."""
    found = {}
    for result, name, arguments in re.findall(
        r"^([a-zA-Z][\w ]*?[ *]+)(xrail_\w+)\(([^)]*)\);", declarations(), re.MULTILINE
    ):
        listed = [] if arguments.strip() == "void" else [one.strip() for one in arguments.split(",")]
        types = [re.sub(r"\s*\b\w+$", "", one) if not one.endswith("*") else one for one in listed]
        found[name] = (result.strip(), [re.sub(r"\s+", " ", one).strip() for one in types])
    return found


def structs() -> dict[str, list[str]]:
    """Fields of each struct that is not a handle, in their order."""
    found = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", declarations(), re.DOTALL):
        fields = []
        for line in body.split(";"):
            if not line.strip():
                continue
            for one in line.split(","):
                match = re.search(r"(\w+)(?:\[\d+\])?\s*$", one)
                assert match is not None, one
                fields.append(match[1])
        found[name] = fields
    return found


def flags() -> list[str]:
    """Names of macros and constants that the ABI fixes."""
    return re.findall(r"\b(XRAIL_[A-Z0-9_]+) = -?\d+", declarations())
