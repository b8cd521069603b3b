"""Signatures with types for the native module, which are in its stub, and links between modules."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

STUB = Path(__file__).parents[2] / "python" / "crossrail" / "_native.pyi"
PRIVATE = "crossrail._native"

_MADE_BY = re.compile(r"(?:[Cc]reated|[Mm]ade) by `")
"""In the text of a class whose constructor is not for programs."""


@cache
def _declared() -> dict[str, tuple[str, str]]:
    """Arguments and result of every function and method of the stub, and the types of properties, by qualified name."""
    found: dict[str, tuple[str, str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                first = not _is_static(node) and bool(prefix)
                arguments = node.args
                if first:
                    arguments.args = arguments.args[1:]
                result = ast.unparse(node.returns) if node.returns is not None else ""
                found[prefix + node.name] = (f"({ast.unparse(arguments)})", result)

    visit(ast.parse(STUB.read_text(encoding="utf-8")).body, "")
    return found


def _is_static(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)


def of_the_stub(
    _app: Any, what: str, _name: str, of: Any, _options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Handles Sphinx's event `autodoc-process-signature`."""
    if inspect.isclass(of) and _MADE_BY.search(of.__doc__ or ""):
        return "", None
    module = getattr(of, "__module__", None) or getattr(getattr(of, "__objclass__", None), "__module__", None)
    if module is None:
        module = getattr(getattr(of, "__self__", None), "__module__", None)
    if module != PRIVATE and not str(getattr(of, "__self__", "")).startswith(f"<module '{PRIVATE}'"):
        return signature, result
    qualified = getattr(of, "__qualname__", "")
    if inspect.isclass(of):
        made = _declared().get(f"{qualified}.__new__")
        return (made[0], None) if made is not None else ("", None)
    return _declared().get(qualified, (signature, result))


def skip(_app: Any, _what: str, name: str, of: Any, skipped: bool, _options: Any) -> bool | None:
    """Handles `autodoc-skip-member`: constructors stand in the text of their class."""
    return True if name.startswith("_") else None


def elsewhere(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Handles `missing-reference`: a name of `crossrail` in a module below it, such as `Worker` in crossrail.kv."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removeprefix("_native.").removeprefix(f"{PRIVATE}.")
    domain = env.get_domain("py")
    for name in (f"crossrail.{target}", target):
        if name in domain.objects:
            found = domain.objects[name]
            return app.builder and _link(app, node, found, content)
    return None


def _link(app: Any, node: Any, found: Any, content: Any) -> Any:
    from sphinx.util.nodes import make_refnode

    return make_refnode(app.builder, node.get("refdoc", ""), found.docname, found.node_id, content, node["reftarget"])
