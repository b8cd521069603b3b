"""`crossrail nccl-plugin`: the library that it names is a plugin, and is the package's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from commands import run

import crossrail
import crossrail.nccl


def test_it_prints_what_to_set() -> None:
    done = run("nccl-plugin")
    assert done.returncode == 0, done.stderr
    path, name = done.stdout.splitlines()
    assert path == f"export NCCL_NET_PLUGIN={Path(crossrail.__file__).with_name('libnccl-net-crossrail.so')}"
    assert name == "export NCCL_NET=Crossrail"
    assert "NCCL_DEBUG=INFO" in done.stderr


@pytest.mark.parametrize("version", range(8, 13))
def test_the_library_has_a_table_of_every_version_that_nccl_looks_for(version: int) -> None:
    library = ctypes.CDLL(str(crossrail.nccl.plugin_path()))
    name = ctypes.c_char_p.in_dll(library, f"ncclNetPlugin_v{version}")
    assert name.value == b"Crossrail"


@pytest.mark.parametrize("version", range(13, 17))
def test_the_library_is_the_rma_plugin_too(version: int) -> None:
    library = ctypes.CDLL(str(crossrail.nccl.plugin_path()))
    name = ctypes.c_char_p.in_dll(library, f"ncclRmaPlugin_v{version}")
    assert name.value == b"Crossrail_RMA"
    assert not hasattr(library, "ncclGinPlugin_v13"), "NCCL would take it for a GIN plugin of its own"


def test_a_package_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossrail.nccl, "LIBRARY", "libnccl-net-elsewhere.so")
    with pytest.raises(crossrail.UnsupportedError, match="libnccl-net-elsewhere"):
        crossrail.nccl.environment()
