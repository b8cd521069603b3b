"""Circles of imports between files of a crate or of a Python package: what can't be read one after the other.

Rust is read by its text: `use` and paths that begin with ``crate``, ``self`` or ``super``, re-exports followed to where
a name is defined. Tests in the source don't count, nor does a module's use of the one that contains it. Of Python,
imports at the top of a file count.

    python tests/python/import_circles.py     prints every circle of the repository
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]

Name = tuple[str, ...]
Graph = dict[Path, set[Path]]

TEST_FILES = ("tests.rs", "models.rs", "conformance.rs")
USE = re.compile(r"((?:pub(?:\([^)]*\))?\s+)?)\buse\s+([^;]+);")
TEST_ITEM = re.compile(
    r"#\[cfg\((?:all\()?test[^\]]*\]\s*(?:pub(?:\([^)]*\))?\s+)?(?:mod\s+\w+\s*\{|(?:use|impl|fn|mod)[^{;]*[;{])"
)
DEFINITION = re.compile(
    r"\b(?:struct|enum|union|trait|type|fn|const|static|macro_rules!)\s+(?:mut\s+)?(\w+)|\bmod\s+(\w+)\s*\{"
)


@dataclass(frozen=True)
class Use:
    """One name that a `use` brings in."""

    path: Name
    name: str
    public: bool


class Module:
    """A Rust source file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = _without_tests(_bare(path.read_text()))

    @cached_property
    def uses(self) -> list[Use]:
        found = []
        for match in USE.finditer(self.text):
            found += [Use(path, name, bool(match[1].strip())) for path, name in _expanded((), match[2])]
        return found

    @cached_property
    def body(self) -> str:
        """Everything but `use` and visibilities."""
        return re.sub(r"pub\(in\s+[\w:]+\)", "", USE.sub("", self.text))

    @cached_property
    def defined(self) -> set[str]:
        return {name for names in DEFINITION.findall(self.text) for name in names if name}

    def paths(self, children: set[str]) -> Iterator[Name]:
        """Paths that this file names. A re-export alone is no use of what it exports."""
        for use in self.uses:
            if not use.public or use.name == "*" or re.search(rf"\b{re.escape(use.name)}\b", self.body):
                yield use.path
        for path in re.findall(r"\b([a-z_]\w*(?:::\w+)+)", self.body):
            first, *rest = path.split("::")
            if first in ("crate", "self", "super"):
                yield (first, *rest)
            elif first in children:
                yield ("self", first, *rest)


class Crate:
    """The modules of a `src` folder."""

    def __init__(self, source: Path) -> None:
        self.modules: dict[Name, Module] = {}
        for path in sorted(source.rglob("*.rs")):
            *folders, last = path.relative_to(source).with_suffix("").parts
            if last == "main" and (source / "lib.rs").exists():
                continue
            self.modules[(*folders,) if last in ("lib", "main", "mod") else (*folders, last)] = Module(path)

    def graph(self) -> Graph:
        graph: Graph = {}
        for name, module in self.modules.items():
            if _is_test(module.path):
                continue
            children = {other[-1] for other in self.modules if other and other[:-1] == name}
            found = {self._resolved(name, path) for path in module.paths(children)}
            used = {other for other in found if other is not None and name[: len(other)] != other}
            paths = {self.modules[other].path for other in used}
            graph[module.path] = {path for path in paths if not _is_test(path)}
        return graph

    def _resolved(self, at: Name, path: Name, depth: int = 0) -> Name | None:
        """The module that defines what ``path`` names in the module ``at``; None: it is of another crate."""
        first, *rest = path
        if first == "crate":
            at = ()
        elif first == "super":
            at = at[:-1]
            while rest and rest[0] == "super":
                at, rest = at[:-1], rest[1:]
        elif first != "self":
            if (*at, first) not in self.modules:
                return None
            rest = [first, *rest]
        while rest and (*at, rest[0]) in self.modules:
            at, rest = (*at, rest[0]), rest[1:]
        if at not in self.modules:
            return None
        module = self.modules[at]
        if not rest or depth > 8 or rest[0] in module.defined or rest[0] == "*":
            return at
        for use in module.uses:
            if use.name == rest[0]:
                within = use.path[0] in ("crate", "self", "super") or (*at, use.path[0]) in self.modules
                return self._resolved(at, use.path, depth + 1) if within else None
        for use in module.uses:
            if use.name == "*":
                found = self._resolved(at, (*use.path[:-1], rest[0]), depth + 1)
                if found is not None and rest[0] in self.modules[found].defined:
                    return found
        return at


def python_graph(package: Path) -> Graph:
    """Imports at the top of the files of a package."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: Graph = {}
    for name, path in files.items():
        around = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = around[: len(around) - node.level + 1] if node.level else []
                module = ".".join([*base, *filter(None, [node.module])])
                found |= {
                    f"{module}.{alias.name}" if f"{module}.{alias.name}" in files else module for alias in node.names
                }
        graph[path] = {files[other] for other in found if other in files} - {path}
    return graph


def circles(graph: Graph) -> list[list[Path]]:
    """Groups of files of which each reaches all others (Tarjan's algorithm)."""
    order: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    stack: list[Path] = []
    found = []

    def visit(file: Path) -> None:
        order[file] = lowest[file] = len(order)
        stack.append(file)
        for other in sorted(graph.get(file, ())):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[file] = min(lowest[file], lowest[other])
        if lowest[file] == order[file]:
            at = stack.index(file)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for file in sorted(graph):
        if file not in order:
            visit(file)
    return found


def circles_of(root: Path) -> list[list[Path]]:
    """Every circle below ``root``, which is laid out as this repository is."""
    graphs = [Crate(source).graph() for source in sorted([*root.glob("crates/*/src"), *root.glob("xtask/src")])]
    graphs += [python_graph(package) for package in root.glob("python/*")]
    return [circle for graph in graphs for circle in circles(graph)]


def _is_test(path: Path) -> bool:
    return path.name in TEST_FILES or path.parent.name == "tests"


def _bare(text: str) -> str:
    """Without comments and the contents of strings."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


def _without_tests(text: str) -> str:
    """Without the items that only tests have."""
    while (match := TEST_ITEM.search(text)) is not None:
        end = match.end()
        open_braces = text[end - 1] == "{"
        while open_braces and end < len(text):
            open_braces += (text[end] == "{") - (text[end] == "}")
            end += 1
        text = text[: match.start()] + text[end:]
    return text


def _expanded(before: Name, tree: str) -> Iterator[tuple[Name, str]]:
    """The paths of the tree of a `use`, each with the name that it gets."""
    head, brace, inner = tree.strip().partition("{")
    path = (*before, *(part.strip() for part in head.split("::") if part.strip()))
    if not brace:
        *_, last = path or ("",)
        source, _, alias = last.partition(" as ")
        path = (*path[:-1], source.strip())
        if path[-1] == "self":
            path = path[:-1]
        if path and path[-1]:
            yield path, alias.strip() or path[-1]
        return
    depth, piece = 0, ""
    for letter in inner.rstrip().removesuffix("}") + ",":
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            if piece.strip():
                yield from _expanded(path, piece)
            piece = ""
        else:
            piece += letter


if __name__ == "__main__":
    for circle in circles_of(ROOT):
        print(*(path.relative_to(ROOT) for path in circle))
