"""One end of SGLang's own KV transfer: `sglang_kv.py SITE BACKEND ROLE PORT ROOMS`.

SITE is a folder with the published package, where it is found; its classes for BACKEND (nixl or mooncake) run
unchanged, with numpy arrays as caches. The prefill end has the bootstrap server and sends chunks of pages of a known
content for every request of ROOMS, as `0,1,2`; the decode end compares every byte of its caches, those of pages that
nobody asked for included. A request with `!` is one whose decode end is killed: both say when they are ready for
that, and the prefill end waits for a line before it sends. What the scheduler would have published of its
configuration is `CONFIG`.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from absent import importing, package
from surroundings_of_engines import Config, until

SITE, BACKEND, ROLE, PORT = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
ROOMS = sys.argv[5].split(",")
ABSENT = (
    *("torch", "triton", "sgl_kernel", "torch_memory_saver", "torchcodec", "cuda", "pynvml"),
    *("PIL", "opentelemetry", "packaging", "pybase64", "pydantic", "pydantic_core", "starlette", "fastapi"),
    # Kernels, models and their configurations.
    *("sglang.kernels", "sglang.srt.layers", "sglang.srt.configs"),
)
LAYERS, PAGES, PAGE_BYTES, AUX_BYTES = 4, 96, 2304, 96
MOST_ROOMS, SENT = 4, 24
CONFIG: dict[str, dict[str, Any]] = {
    "parallel": {
        **dict.fromkeys(("tp_size", "attn_tp_size", "attn_cp_size", "attn_dcp_size", "attn_dp_size", "dp_size"), 1),
        **dict.fromkeys(("pp_size", "num_dp_ranks"), 1),
        **dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dcp_rank", "attn_dp_rank"), 0),
        "load_balance_method": "round_robin",
    },
    "serving": {"host": "127.0.0.1", "port": PORT + 1},
    "disagg": {"disaggregation_bootstrap_port": PORT, "disaggregation_decode_allocation_policy": "early"},
    "device": {"device": "cpu"},
    **{name: {} for name in ("schedule", "spec", "exec", "model", "memory", "observability")},
}


def sglang() -> tuple[ModuleType, Any, Any]:
    """The modules of the backend and of what it is given, and the kinds of ends."""
    package("sglang", SITE)
    with importing(*ABSENT):
        context = importlib.import_module("sglang.srt.runtime_context")
        for name, values in CONFIG.items():
            setattr(context, f"get_{name}", partial(Config, **values))
        connection = importlib.import_module(f"sglang.srt.disaggregation.{BACKEND}.conn")
        base = importlib.import_module("sglang.srt.disaggregation.base.conn")
        modes = importlib.import_module("sglang.srt.disaggregation.utils").DisaggregationMode
        if BACKEND == "mooncake":
            place = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
            importlib.import_module(place).init_mooncake_transfer_engine("127.0.0.1", 0, None)
    sys.modules["torch"].get_device_module = lambda _: SimpleNamespace(set_device=lambda _: None)
    return connection, base, modes


def content() -> list[Any]:
    """Of keys and values of every layer, then of the auxiliary buffer: what the prefill end has."""
    random = np.random.default_rng(7)
    shapes = [(PAGES, PAGE_BYTES)] * (2 * LAYERS) + [(MOST_ROOMS + 1, AUX_BYTES)]
    return [random.integers(1, 256, shape, dtype=np.uint8) for shape in shapes]


def arguments(base: Any, buffers: list[Any]) -> Any:
    """SGLang's description of these caches."""
    *caches, aux = buffers
    made = base.KVArgs()
    values: dict[str, Any] = {
        **dict.fromkeys(("engine_rank", "gpu_id", "system_dp_rank", "pp_rank", "prefill_start_layer"), 0),
        "kv_data_ptrs": [one.ctypes.data for one in caches],
        "kv_data_lens": [one.nbytes for one in caches],
        "kv_item_lens": [PAGE_BYTES] * len(caches),
        "kv_data_mem_kinds": ["DRAM"] * len(caches),
        "kv_layer_ids": [*range(LAYERS), *range(LAYERS)],
        "kv_cache_dtype_str": "uint8",
        "aux_data_ptrs": [aux.ctypes.data],
        "aux_data_lens": [aux.nbytes],
        "aux_item_lens": [AUX_BYTES],
        **{f"state_{name}": [] for name in ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids")},
        **{f"state_{name}": [] for name in ("dim_per_tensor", "slice_outer_counts", "conv_shard_groups")},
        **dict.fromkeys(("kv_head_num", "total_kv_head_num"), 8),
        **dict.fromkeys(("swa_kv_cache_layout", "ib_device", "rust_http_port", "mla_compression_ratios")),
        "is_hybrid_mla_backend": False,
        "page_size": 16,
        "prefill_end_layer": LAYERS,
    }
    for name, value in values.items():
        setattr(made, name, value)
    return made


def pages_of(room: int) -> tuple[Any, Any]:
    """The pages that a request sends, and where they go."""
    sent = (np.arange(SENT, dtype=np.int32) * 5 + room) % PAGES
    return sent, (np.arange(SENT, dtype=np.int32)[::-1] + room * SENT).copy()


def until_state(end: Any, wanted: int, other: int) -> None:
    """Polls a sender or receiver as SGLang's event loop does."""

    def step() -> bool:
        state = end.poll()
        if state == other:
            end.failure_exception()
        return bool(state == wanted)

    until(step, f"state {wanted}")


def prefill(kinds: Any, base: Any, modes: Any) -> None:
    """Sends the pages of every request in two chunks, and waits until it is told to end."""
    kinds("KVBootstrapServer")("127.0.0.1", PORT)
    until(listens, "starting the bootstrap server")
    buffers = content()
    manager = kinds("KVManager")(arguments(base, buffers), modes.PREFILL, Config(enable_pd_role_switch=False))
    for name in ROOMS:
        room = int(name.rstrip("!"))
        sender = kinds("KVSender")(manager, f"127.0.0.1:{PORT}", room)
        sender.init(SENT, room)
        until_state(sender, base.KVPoll.WaitingForInput, base.KVPoll.Failed)
        sent, _ = pages_of(room)
        if name.endswith("!"):
            print("ready", flush=True)
            sys.stdin.readline()
        sender.send(sent[:7])
        sender.send(sent[7:])
        if name.endswith("!"):
            until_state(sender, base.KVPoll.Failed, base.KVPoll.Success)
        else:
            until_state(sender, base.KVPoll.Success, base.KVPoll.Failed)
    print("sent", flush=True)
    sys.stdin.read()


def decode(kinds: Any, base: Any, modes: Any) -> None:
    """Asks for the pages of every request, and compares all that there is afterwards."""
    buffers = [np.zeros_like(one) for one in content()]
    expected = [np.zeros_like(one) for one in buffers]
    manager = kinds("KVManager")(arguments(base, buffers), modes.DECODE, Config(enable_pd_role_switch=False))
    address = f"127.0.0.1:{PORT}"
    until(lambda: manager.try_ensure_parallel_info(address), "registering the prefill end")
    for name in ROOMS:
        room = int(name.rstrip("!"))
        receiver = kinds("KVReceiver")(manager, address, room)
        receiver.init(0)
        sent, places = pages_of(room)
        receiver.send_metadata(places, room + 1)
        if name.endswith("!"):
            print("asked", flush=True)
            sys.stdin.read()
        until_state(receiver, base.KVPoll.Success, base.KVPoll.Failed)
        *caches, aux = content()
        for cache, whole in zip(expected, caches, strict=False):
            cache[places] = whole[sent]
        expected[-1][room + 1] = aux[room]
        for at, (found, wanted) in enumerate(zip(buffers, expected, strict=True)):
            if not np.array_equal(found, wanted):
                raise AssertionError(f"buffer {at} differs after request {room}")
    print("received", flush=True)


def listens() -> bool:
    """Whether the bootstrap server is up."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


def main() -> None:
    """Runs one end; threads of SGLang's that have no end are left to the end of the process."""
    connection, base, modes = sglang()
    name = {"nixl": "Nixl", "mooncake": "Mooncake"}[BACKEND]

    def kinds(kind: str) -> Any:
        return getattr(connection, name + kind)

    {"prefill": prefill, "decode": decode}[ROLE](kinds, base, modes)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
