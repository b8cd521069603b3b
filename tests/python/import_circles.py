"""Circles of imports at the top of the files of a Python package, those for type checkers included. `cargo xtask
budgets` looks for those of crates.

python tests/python/import_circles.py     prints every circle of the repository
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

Graph = dict[Path, set[Path]]


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
        top = ast.parse(path.read_text()).body
        # A package's own file names there what it imports on first use.
        typed = [] if path.name == "__init__.py" else [one for one in top if isinstance(one, ast.If)]
        for node in [*top, *(inner for one in typed for inner in one.body)]:
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
    graphs = [python_graph(package) for package in root.glob("python/*")]
    return [circle for graph in graphs for circle in circles(graph)]


if __name__ == "__main__":
    for circle in circles_of(ROOT):
        print(*(path.relative_to(ROOT) for path in circle))
