"""Completeness of the reference and of `help()`: arguments, errors, units and thread rules of public objects."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
MODULES = ("crossrail", "crossrail.kv", "crossrail.nixl", "crossrail.mooncake", "crossrail.deep_ep")

UNITS = {
    r"timeout|stall|waited|duration": r"\bseconds?\b|\bms\b|milliseconds",
    r"nbytes|offset|length|capacity|piece|num_nvl_bytes|num_rdma_bytes": r"\bbytes?\b",
}
"""Arguments that have a unit, and the word that must be in the text."""


def public() -> Iterator[tuple[str, Any]]:
    """Every public class and function by its name; a class that two modules offer once."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            of = getattr(module, name)
            own = getattr(of, "__module__", "").startswith("crossrail")
            if callable(of) and own and id(of) not in seen:
                seen.add(id(of))
                yield f"{module_name}.{name}", of


PUBLIC = dict(public())


def members(of: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself declares, without fields of tuples and dataclasses."""
    fields = {*getattr(of, "_fields", ()), *getattr(of, "__dataclass_fields__", ())}
    private = [base for base in of.__mro__[1:] if base.__module__.startswith("crossrail") and base.__name__[0] == "_"]
    for name, value in {**{k: v for base in reversed(private) for k, v in vars(base).items()}, **vars(of)}.items():
        documented = callable(value) or isinstance(
            value, (classmethod, staticmethod, property, types.GetSetDescriptorType)
        )
        if not name.startswith("_") and name not in fields and documented and not isinstance(value, enum.Enum):
            yield name, getattr(value, "__func__", value)


def callables() -> Iterator[tuple[str, Any, str]]:
    """Everything with arguments: its name, itself, and the text in which they are described."""
    for name, of in PUBLIC.items():
        yield name, of, inspect.getdoc(of) or ""
        if inspect.isclass(of):
            for member, value in members(of):
                if callable(value) and not inspect.isclass(value):
                    yield f"{name}.{member}", value, inspect.getdoc(value) or ""


def arguments(of: Any) -> list[str]:
    """Arguments of a call."""
    if inspect.isclass(of) and (
        issubclass(of, (BaseException, enum.Enum, tuple)) or hasattr(of, "__dataclass_fields__")
    ):
        return []
    signature = inspect.signature(of)
    return [name for name in signature.parameters if name not in ("self", "cls") and not name.startswith("_")]


CALLABLES = {name: (of, text) for name, of, text in callables()}
MADE_BY = re.compile(r"(?:[Cc]reated|[Mm]ade) by `")
"""In the text of a class whose constructor is not for programs."""
AS_ELSEWHERE = re.compile(r"\b[Aa]s (?:for |in |of |by |with )?`|as there\b")


def described(name: str) -> bool:
    """True for a callable whose arguments a program supplies."""
    of, text = CALLABLES[name]
    return bool(arguments(of)) and not (inspect.isclass(of) and MADE_BY.search(text))


def test_every_public_object_has_a_text_of_its_own() -> None:
    missing = [name for name, of in PUBLIC.items() if not of.__doc__]
    for name, of in PUBLIC.items():
        if inspect.isclass(of):
            public_bases = [base for base in of.__mro__[1:] if not base.__name__.startswith("_")]
            missing += [name for base in public_bases if of.__doc__ == base.__doc__]
            missing += [f"{name}.{member}" for member, value in members(of) if not value.__doc__]
    assert not missing


def test_every_argument_is_described() -> None:
    missing = {}
    for name in filter(described, CALLABLES):
        of, text = CALLABLES[name]
        quoted = set(re.findall(r"`{1,2}([a-zA-Z_]\w*)", text))
        listed = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: :.*)?$", text, re.MULTILINE)
        named = quoted | {word.lstrip("*") for line in listed for word in line.split(", ")}
        lacks = [one for one in arguments(of) if one not in named]
        if lacks and not AS_ELSEWHERE.search(text):
            missing[name] = lacks
    assert not missing


def test_errors_are_described() -> None:
    says = re.compile(r"[Rr]ais|[Rr]efused with|Errors?\b|-1\b")
    texts = {name: CALLABLES[name][1] for name in filter(described, CALLABLES)}
    missing = [name for name, text in texts.items() if not says.search(text) and not AS_ELSEWHERE.search(text)]
    assert not missing


def test_units_are_named() -> None:
    missing = []
    for name in filter(described, CALLABLES):
        of, text = CALLABLES[name]
        for pattern, unit in UNITS.items():
            of_a_unit = [one for one in arguments(of) if re.fullmatch(pattern, one)]
            if of_a_unit and not re.search(unit, text, re.IGNORECASE) and not AS_ELSEWHERE.search(text):
                missing.append((name, of_a_unit))
    assert not missing


def test_thread_rules_are_stated() -> None:
    modules = {module: importlib.import_module(module).__doc__ or "" for module in MODULES}
    classes = {name: of for name, of in PUBLIC.items() if inspect.isclass(of)}
    missing = [
        name
        for name, of in classes.items()
        if not re.search("[Tt]hread", of.__doc__ + modules[name.rpartition(".")[0]])
    ]
    assert not missing


def test_the_site_has_every_public_object() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (SITE / "api").glob("*.md"))
    direct = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", pages, re.MULTILINE))
    for module, names in re.findall(r"automodule:: ([\w.]+)\n(?:   .*\n)*?   :members: (.+)", pages):
        direct |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert set(PUBLIC) - direct == set()
    assert {name for name in direct if not name.startswith(MODULES)} == set()


def test_every_page_is_in_the_contents_of_the_site() -> None:
    """A page that is in none ends `make site` with an error, and that is not part of the tests."""
    listed: set[Path] = set()
    for page in SITE.rglob("*.md"):
        for tree in re.findall(
            r"^```{toctree}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            entries = [line.strip() for line in tree.splitlines() if line.strip() and not line.startswith(":")]
            names = [re.sub(r"^.*<(.*)>$", r"\1", entry) for entry in entries]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    folders = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/**/*.md")]
    pages = {*folders, *ROOT.glob("packages/*/README.md"), ROOT / "fuzz" / "README.md"}
    assert pages - listed == {ROOT / "docs" / "README.md", SITE / "index.md"}


def test_the_stub_and_the_extension_have_the_same_arguments() -> None:
    stub = ast.parse((ROOT / "python" / "crossrail" / "_native.pyi").read_text(encoding="utf-8"))
    declared: dict[str, list[str]] = {}
    for node in stub.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                given = [*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs]
                given += [one for one in (inner.args.vararg, inner.args.kwarg) if one is not None]
                prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                declared[prefix + inner.name] = [one.arg for one in given if one.arg not in ("self", "cls")]
    native = {name.removeprefix("crossrail."): of for name, (of, _) in CALLABLES.items() if name.count(".") <= 2}
    for name, of in native.items():
        key = f"{name}.__new__" if inspect.isclass(of) else name
        if key in declared and getattr(of, "__module__", None) in (None, "crossrail._native"):
            assert [one for one in declared[key] if not one.startswith("_")] == arguments(of), name
