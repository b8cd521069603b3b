"""Checks what a change touches, in about a minute: `make check`, or `make check SINCE=main`.

    python tests/check.py [COMMIT]

The change is what the working tree has beyond COMMIT, new files included; by default beyond HEAD, or beyond its parent
if nothing is changed. Of Rust, the crates with changed files are linted and tested, and everything that uses them is
type-checked. Of Python, changed files are linted, and the tests run that are
changed or that name a changed module.
Rules of the layout are checked of the whole tree. `make test` is what CI runs, and more.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Runs the checks one after the other until one fails; gives its exit code."""
    changed = changes(sys.argv[1] if len(sys.argv) > 1 else None)
    if not changed:
        print("check: nothing is changed")
        return 0
    for command in commands(changed):
        print(f"\n== {' '.join(command)}", flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


def changes(since: str | None) -> list[Path]:
    """The changed files, relative to the root; deleted ones too."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )

    new = git("ls-files", "--others", "--exclude-standard")
    found = {line for line in git("diff", "--name-only", since or "HEAD") + new if line}
    if not found and since is None:
        found = {line for line in git("diff", "--name-only", "HEAD~1") if line}
    return sorted(Path(line) for line in found)


def commands(changed: list[Path]) -> list[list[str]]:
    """Commands for these files, the fastest first."""
    present = [path for path in changed if (ROOT / path).exists()]
    python = [str(path) for path in present if path.suffix in {".py", ".pyi"}]
    crates = sorted({package(path.parts) for path in changed} - {None})
    own = [option for crate in crates for option in ("--package", str(crate))]
    tests = tests_of(changed)
    run: list[list[str]] = [["cargo", "fmt", "--all", "--check"]] if crates else []
    if python:
        run += [["ruff", "check", *python], ["ruff", "format", "--check", *python]]
    run.append(["cargo", "run", "--quiet", "--locked", "--profile", "test", "--package", "xtask", "--", "lint"])
    if crates:
        features = ["--features", "crossrail/simulated-gpu"] if "crossrail" in crates else []
        run.append(["cargo", "clippy", "--quiet", "--locked", *own, "--all-targets", *features, "--", "-D", "warnings"])
        run.append(["cargo", "check", "--quiet", "--locked", "--workspace"])
        tested = [option for crate in crates if crate != "crossrail-python" for option in ("--package", str(crate))]
        if tested:
            run.append(["cargo", "test", "--quiet", "--locked", *tested, *features, "--lib", "--bins", "--tests"])
    if python:
        run.append(["mypy"])
    if tests:
        run.append([sys.executable, "-m", "pytest", "--quiet", *tests])
    tools = Path(sys.executable).parent
    return [[str(tools / one[0]) if one[0] in {"ruff", "mypy"} else one[0], *one[1:]] for one in run]


def package(parts: tuple[str, ...]) -> str | None:
    """The Cargo package that a file belongs to."""
    if parts[0] in {"xtask", "fuzz"}:
        return {"xtask": "xtask", "fuzz": "crossrail-fuzz"}[parts[0]]
    if parts[0] != "crates" or len(parts) < 3:
        return None
    manifest = ROOT / "crates" / parts[1] / "Cargo.toml"
    found = re.search(r'^name = "(.+)"$', manifest.read_text(), re.MULTILINE) if manifest.exists() else None
    return found.group(1) if found else None


def tests_of(changed: list[Path]) -> list[str]:
    """The tests of Python that are changed, or that name a changed module or one of its public classes."""
    tests = sorted((ROOT / "tests" / "python").glob("test_*.py"))
    named = {str(path) for path in changed if path.name.startswith("test_") and path.suffix == ".py"}
    modules = [path for path in changed if path.suffix == ".py" and path.parts[0] in {"python", "packages", "benches"}]
    words = [re.compile(rf"\b{re.escape('.'.join(module.with_suffix('').parts[-2:]))}\b") for module in modules]
    words += [re.compile(rf"\b(?:import|from) .*\b{re.escape(module.stem)}\b") for module in modules]
    texts_of_modules = [(ROOT / module).read_text() for module in modules if (ROOT / module).exists()]
    classes = {name for text in texts_of_modules for name in re.findall(r"^class ([A-Z]\w+)", text, re.MULTILINE)}
    words += [re.compile(rf"\b{name}\b") for name in sorted(classes)]
    texts = [(test.relative_to(ROOT), test.read_text()) for test in tests]
    named |= {str(test) for test, text in texts if any(word.search(text) for word in words)}
    return sorted(name for name in named if (ROOT / name).exists())


if __name__ == "__main__":
    sys.exit(main())
