"""Packages that are not installed, as stubs: an engine's Python imports on a machine without its compiled parts.

While an engine is being imported, anything may be done with a stub: attributes of attributes, subscripts, decorators,
base classes. Afterwards a call of one raises NotImplementedError with its name, so that what a program really uses is
what is installed. Of `is_...` every stub says False, as in `torch.cuda.is_available()`.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_importing: list[bool] = [False]
# Other vendors' parts of torch, whose presence means such a machine.
_NEVER = {"npu", "musa", "hpu"}


class _Stub(ABCMeta):
    """Type of stubs, which are classes because some are derived from."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub(f"{cls.__qualname__}.{name}")
        setattr(cls, name, made)
        return made

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if "_absent" not in cls.__dict__:
            return super().__call__(*arguments, **options)
        if not _importing[0]:
            raise NotImplementedError(f"{cls.__qualname__} is not installed")
        decorates = len(arguments) == 1 and not options and isinstance(arguments[0], (FunctionType, type))
        return arguments[0] if decorates else cls

    def register(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else cls

    def __getitem__(cls, _: object) -> Any:
        return cls

    def __setitem__(cls, _: object, __: object) -> None:
        pass

    def __or__(cls, _: object) -> Any:
        return cls

    __ror__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __contains__(cls, _: object) -> bool:
        return False

    def __instancecheck__(cls, _: object) -> bool:
        return False

    def __int__(cls) -> int:
        return 0

    def __lt__(cls, _: object) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


def _stub(name: str) -> Any:
    last = name.rpartition(".")[2]
    if last.startswith("is_"):
        return lambda *_, **__: False
    return _Stub(last, (), {"__qualname__": name, "_absent": True, "__init__": lambda *_, **__: None})


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0"
        if name in _NEVER or name.startswith("__"):
            raise AttributeError(name)
        made = _stub(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if any(name == one or name.startswith(one + ".") for one in self._names):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def package(name: str, site: str) -> ModuleType:
    """An engine's package, or one within it, without its own `__init__`, which would import what is absent."""
    made = ModuleType(name)
    made.__path__ = [str(Path(site, *name.split(".")))]
    sys.modules[name] = made
    return made


@contextlib.contextmanager
def importing(*names: str) -> Iterator[None]:
    """Within it an engine is imported; `names` and all below them are stubs, then and later."""
    sys.meta_path.insert(0, _Finder(names))
    _importing[0] = True
    try:
        yield
    finally:
        _importing[0] = False
