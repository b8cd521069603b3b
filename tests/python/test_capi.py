"""The C library: what it exports, that its headers are true, and what each function promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from c_programs import (
    C_COMPILERS,
    CXX_COMPILERS,
    EXAMPLES,
    HEADERS,
    ROOT,
    SOURCES,
    TARGET,
    build,
    checks,
    declarations,
    flags,
    functions,
    installed,
    structs,
)

import crossrail

pytestmark = pytest.mark.timeout(900)  # the first builds the library
LIBRARY = {"xrail_version", "xrail_has", "xrail_result_name", "xrail_last_error"}
"""Functions without handles, results and waits, which checks.c has."""
ABI = ROOT / "crates" / "capi" / "abi.txt"


def run(*command: str | Path) -> str:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")


def built(programs: Path, source: Path) -> Path:
    program = programs / source.stem
    return program if program.exists() else build(source, program)


def test_ci_has_both_compilers() -> None:
    if os.environ.get("CI") == "true":
        assert (C_COMPILERS, CXX_COMPILERS) == (["gcc", "clang"], ["g++", "clang++"])


@pytest.mark.parametrize("compiler", [*C_COMPILERS, *CXX_COMPILERS])
def test_headers_and_programs_compile_without_a_warning(tmp_path: Path, compiler: str) -> None:
    alone = [tmp_path / f"{header.stem}_alone.c" for header in HEADERS]
    for source, header in zip(alone, HEADERS, strict=True):
        source.write_text(f"#include <{header.name}>\nint main(void) {{ return 0; }}\n")
    for source in (*alone, *(EXAMPLES / f"{name}.c" for name in ("two_processes", "kv_rows", "experts"))):
        build(source, tmp_path / source.stem, compiler)
    if compiler.endswith("++"):
        for source in (EXAMPLES / "two_processes.cpp", SOURCES / "wrapper.cpp", SOURCES / "experts_wrapper.cpp"):
            build(source, tmp_path / f"{source.stem}_cpp", compiler)


@pytest.mark.parametrize("tls", ["shm", "tcp"])
@pytest.mark.parametrize(("program", "name"), checks())
def test_each_function_keeps_its_promises(programs: Path, program: str, name: str, tls: str) -> None:
    assert run(built(programs, SOURCES / program), name, tls) == "good\n"


def test_every_function_is_misused() -> None:
    """The tables have a line for each function with a result; the others are called there as well."""
    text = "".join((SOURCES / name).read_text() for name in ("misuse.c", "experts_misuse.c"))
    table = re.findall(r"^    X\(\w+, \w+, \w+, (xrail_\w+),", text, re.MULTILINE)
    with_result = {name for name, (result, _) in functions().items() if result in {"XRAIL_CALL", "xrail_result"}}
    assert sorted(table) == sorted(with_result)
    assert {name for name in functions() if f"{name}(" not in text} - with_result <= LIBRARY


@pytest.mark.parametrize("tls", ["shm", "tcp"])
def test_the_wrapper_frees_and_throws(programs: Path, tls: str) -> None:
    program = programs / "wrapper"
    program = program if program.exists() else build(SOURCES / "wrapper.cpp", program, "g++")
    assert run(program, tls) == "good\n"


def as_c(rust: str) -> str:
    """The type in C of an argument in Rust, without names of structs."""
    known = {"i32": "int", "c_int": "int", "u32": "uint32_t", "u64": "uint64_t", "i64": "int64_t"}
    known |= {"usize": "size_t", "f32": "float"}
    if match := re.fullmatch(r"\*(mut|const) (.*)", rust):
        return f"{as_c(match[2])} *"
    rust = rust.rpartition("::")[2]
    return {"c_void": "void", "c_char": "char", "Option<LogFn>": "xrail_log_fn"}.get(rust, known.get(rust, rust))


def test_the_headers_declare_what_the_sources_define() -> None:
    sources = "".join(path.read_text() for path in sorted((ROOT / "crates" / "capi" / "src").glob("*.rs")))
    pattern = r'extern "C" fn (xrail_\w+)\(([^)]*)\)(?: -> ([^{]+))? \{'
    defined = {name: (result, arguments) for name, arguments, result in re.findall(pattern, sources)}
    assert set(defined) == set(functions())
    names = {"Unpacked": "description"}
    for name, (result, arguments) in defined.items():
        rust = [as_c(one.split(": ", 1)[1].strip()) for one in re.findall(r"\w+: [^,]+", arguments)]
        c_result, c_arguments = functions()[name]
        plain = [one.replace("const ", "").replace("const", "") for one in c_arguments]
        plain = [re.sub(r"\b(xrail_result|int32_t)\b", "int", one) for one in plain]
        plain = [re.sub(r"\s*\*\s*", " *", one).replace(" * *", " **").strip() for one in plain]
        ours = [re.sub(r"( \*)+$", lambda stars: " " + "*" * stars[0].count("*"), one) for one in rust]

        def struct(text: str) -> str:
            base = text.partition(" ")[0]
            if not base[:1].isupper():
                return text
            snake = re.sub(r"(?<!^)([A-Z])", r"_\1", names.get(base, base)).lower().removeprefix("xrail_")
            return f"xrail_{snake}" + text[len(base) :]

        assert [struct(one) for one in ours] == plain, name
        assert bool(result.strip()) == (c_result.split()[-1] != "void" or "*" in c_result), name


def test_symbols_sizes_and_numbers_are_the_committed_ones(tmp_path: Path) -> None:
    library = installed() / "lib" / "libcrossrail.so"
    shown = run("nm", "--dynamic", "--defined-only", "--with-symbol-versions", library)
    symbols = sorted(line.split()[2] for line in shown.splitlines() if line.split()[1] != "A")
    prints = [
        f'printf("struct {name} %zu' + "".join(f" {field}@%zu" for field in fields) + '\\n", '
        f"sizeof({name})" + "".join(f", offsetof({name}, {field})" for field in fields) + ");"
        for name, fields in structs().items()
    ]
    prints += [f'printf("{flag} %d\\n", (int){flag});' for flag in flags()]
    source = tmp_path / "layouts.c"
    source.write_text(
        "#include <crossrail_experts.h>\n#include <stdio.h>\nint main(void) {\n"
        + "\n".join(prints)
        + "\nreturn 0;\n}\n"
    )
    layouts = run(build(source, tmp_path / "layouts")).splitlines()
    now = "\n".join([*symbols, *layouts]) + "\n"
    assert now == ABI.read_text(), f"the ABI has changed; what is only added may be recorded in {ABI}"
    assert {symbol.partition("@@")[0] for symbol in symbols} == set(functions())
    dynamic = run("readelf", "--dynamic", "--wide", library)
    assert "Library soname: [libcrossrail.so.0]" in dynamic and "NODELETE" in dynamic
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic))
    assert needed <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_no_function_takes_null_for_a_handle(tmp_path: Path) -> None:
    """And none crashes; what frees does nothing."""
    calls = []
    for name, (result, arguments) in functions().items():
        if name in {"xrail_set_log", "xrail_context_create"}:
            continue
        zeros = ", ".join(f"({one})0" for one in arguments)
        if result == "XRAIL_CALL" and name not in {"xrail_finish", "xrail_exchange_finish", "xrail_dealloc"}:
            calls.append(f'if ({name}({zeros}) != XRAIL_ERROR_USAGE) {{ puts("{name}"); bad = 1; }}')
            calls.append(f'if (strstr(xrail_last_error()->text, "NULL") == NULL) {{ puts("{name}: text"); bad = 1; }}')
        else:
            calls.append(f"(void)!{name}({zeros});" if result not in {"void"} else f"{name}({zeros});")
    source = tmp_path / "nulls.c"
    calls.append("if (xrail_context_create(NULL, NULL) != XRAIL_ERROR_USAGE) bad = 1;")
    source.write_text(
        "#include <crossrail_experts.h>\n#include <stdio.h>\nint main(void) {\nint bad = 0;\n"
        + "\n".join(calls)
        + "\nreturn bad;\n}\n"
    )
    assert len(calls) > 80
    run(build(source, tmp_path / "nulls"))


def test_it_can_be_loaded_and_unloaded_again_and_again(tmp_path: Path) -> None:
    source = tmp_path / "loads.c"
    source.write_text("""#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
int main(int argc, char **argv) {
    (void)argc;
    for (int turn = 0; turn < 100; turn++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        union { void *object; uint32_t (*call)(void); } version;
        if (library == NULL || (version.object = dlsym(library, "xrail_version")) == NULL || version.call() != 1)
            return 1;
        dlclose(library);
    }
    return 0;
}
""")
    run(build(source, tmp_path / "loads"), installed() / "lib" / "libcrossrail.so.0")


def listening(*command: str | Path) -> tuple[subprocess.Popen[str], str]:
    """An end that listens, and its address."""
    process = subprocess.Popen([str(one) for one in command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening: "), line
    return process, line.split()[-1]


ENDS: dict[str, Callable[[Path], list[str | Path]]] = {
    "c": lambda programs: [built(programs, EXAMPLES / "two_processes.c")],
    "c++": lambda programs: [build(EXAMPLES / "two_processes.cpp", programs / "two_processes_cpp", "g++")],
    "python": lambda _: [sys.executable, ROOT / "examples" / "python" / "two_processes.py"],
    "rust": lambda _: [TARGET / "debug" / "examples" / "two_processes"],
}


@pytest.mark.parametrize(
    ("listener", "connector"),
    [("c", "c"), ("c", "python"), ("python", "c"), ("c", "rust"), ("rust", "c"), ("c++", "c"), ("c", "c++")],
)
def test_the_ends_may_be_of_different_languages(programs: Path, listener: str, connector: str) -> None:
    process, address = listening(*ENDS[listener](programs), "listen")
    with process:
        try:
            run(*ENDS[connector](programs), "connect", address)
            assert process.stdout is not None
            assert process.stdout.read().startswith("hello from the other side (")
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_rows_are_pulled_and_the_holder_is_told(programs: Path, tmp_path: Path) -> None:
    program, where = built(programs, EXAMPLES / "kv_rows.c"), tmp_path / "holder"
    with subprocess.Popen([str(program), str(where)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            while not where.exists():
                assert holder.poll() is None
                time.sleep(0.01)
            assert "one transfer" in run(program, where, "pull")
            assert holder.communicate(timeout=30)[0] == "puller: request 1\n" and holder.returncode == 0
        finally:
            holder.kill()


def test_a_peer_that_is_killed_raises_no_sigpipe(programs: Path) -> None:
    source = """
import sys, crossrail
worker = crossrail.Worker(crossrail.Context(tls="tcp", net_devices="127.0.0.1"))
print("listening:", worker.control_addresses()[0], flush=True)
endpoint, inbox = worker.accept(), bytearray(32 << 20)
while True:
    worker.recv(inbox, tag=7).wait()
"""
    peer, address = listening(sys.executable, "-c", source)
    with (
        peer,
        subprocess.Popen(
            [str(built(programs, SOURCES / "flood.c")), address],
            stdout=subprocess.PIPE,
            text=True,
            restore_signals=True,
        ) as flood,
    ):
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "sent\n"
            peer.kill()
            rest = flood.communicate(timeout=120)[0]
            assert flood.returncode == 0 and "peer_dead: " in rest, (flood.returncode, rest)
        finally:
            flood.kill()


def test_gpu_memory_is_moved_or_refused_with_the_reason(programs: Path) -> None:
    program = built(programs, SOURCES / "gpu.c")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 3:
        assert "CUDA" in done.stdout
    else:
        assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_cmake_and_pkg_config_find_an_installation(tmp_path: Path) -> None:
    if missing := [tool for tool in ("cmake", "pkg-config") if shutil.which(tool) is None]:
        assert os.environ.get("CI") != "true", f"CI=true, but {missing} are not installed"
        pytest.skip(f"{' and '.join(missing)} not installed")
    # Of its own, since other workers may install meanwhile; and moved, as it is relocatable.
    command = [sys.executable, ROOT / "packaging" / "c_library.py", "--as-tested", "--prefix", tmp_path / "made"]
    environment = os.environ | {"CARGO_TARGET_DIR": str(TARGET)}
    subprocess.run([str(word) for word in command], check=True, env=environment)
    prefix = (tmp_path / "made").rename(tmp_path / "moved")
    run("cmake", "-S", EXAMPLES, "-B", tmp_path / "cmake", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "cmake")
    program = tmp_path / "cmake" / "two_processes"
    assert f"[{prefix}/lib" in run("readelf", "--dynamic", "--wide", program)
    process, address = listening(program, "listen")
    with process:
        run(tmp_path / "cmake" / "two_processes_cpp", "connect", address)
        assert process.wait(30) == 0
    query = ["env", f"PKG_CONFIG_PATH={prefix}/lib/pkgconfig", "pkg-config"]
    assert run(*query, "--modversion", "crossrail").strip() == crossrail.__version__
    shared = run(*query, "--cflags", "--libs", "crossrail").split()
    # The static library alone, which may be linked together with another Rust library.
    static = [one for one in run(*query, "--cflags", "--libs", "--static", "crossrail").split() if one != "-lcrossrail"]
    for options in (shared, [*static, str(prefix / "lib" / "libcrossrail.a"), *static]):
        source, to = str(EXAMPLES / "two_processes.c"), str(tmp_path / "linked")
        run("gcc", "-std=c11", source, "-o", to, f"-Wl,-rpath,{prefix}/lib", *options)
        refused = subprocess.run([to, "connect", "127.0.0.1:1"], capture_output=True, text=True, check=False)
        assert refused.returncode == 1 and refused.stderr.startswith("connect: "), refused
    names = run("nm", "--defined-only", "--extern-only", prefix / "lib" / "libcrossrail.a")
    assert {line.split()[2] for line in names.splitlines() if len(line.split()) == 3} == set(functions())


def test_the_headers_have_no_comment_that_is_not_closed() -> None:
    for header in HEADERS:
        assert header.read_text().count("/*") == header.read_text().count("*/")
    assert "xrail_" in declarations()
