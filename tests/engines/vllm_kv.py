"""One end of vLLM's own NIXL connector: `vllm_kv.py SITE ROLE PORT REQUESTS [PORT]`.

SITE is a folder with the published package, where it is found; its workers run unchanged, with numpy arrays as caches.
The ends of the one that pulls are `prefill` and `decode`, those of the one that pushes `push` and `pushed`, which has a
port of its own behind that of its peer. The prefill end answers handshakes as vLLM's scheduler does, and hands out the
blocks of every request of REQUESTS, as `0,1,2`; the decode end compares every byte of its caches, those of blocks that
nobody asked for included. A request with `!` is one whose peer is killed. Of pulls that is the prefill end, before the
decode end asks: the request must fail, by its blocks. Of pushes it is the decode end, after it has asked: the push must
fail, and later ones must not.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq
from absent import importing, package
from surroundings_of_engines import LIMIT_S, Config, until

SITE, ROLE, PORT, REQUESTS = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")
OWN_PORT = int(sys.argv[5]) if len(sys.argv) > 5 else PORT
ABSENT = (
    *("torch", "triton", "cuda", "pynvml", "numba", "flashinfer", "uvloop", "cpuinfo"),
    *("transformers", "huggingface_hub", "tokenizers", "safetensors", "tiktoken", "mistral_common", "gguf"),
    *("pydantic", "pydantic_core", "fastapi", "starlette", "openai", "openai_harmony", "xgrammar", "llguidance"),
    *("PIL", "cbor2", "opentelemetry", "tqdm", "einops", "blake3", "cachetools", "yaml", "compressed_tensors"),
    *("cloudpickle", "partial_json_parser", "depyf", "jinja2", "filelock", "prometheus_client"),
    # What runs models, and the compiled parts.
    *(f"vllm.{name}" for name in ("_C", "model_executor", "models", "compilation", "lora", "third_party")),
    *(f"vllm.{name}" for name in ("config", "inputs", "multimodal", "renderers", "tokenizers", "transformers_utils")),
    *(f"vllm.{name}" for name in ("entrypoints", "outputs", "pooling_params", "sampling_params", "v1.attention")),
)
LAYERS, BLOCKS, TOKENS, HEADS, HEAD_BYTES = 4, 96, 16, 8, 32
"""One block of a layer has keys and values: 16 tokens of 8 heads of 2 x 16 bytes."""
TAKEN = 24
LEASE_S = 1.0
"""Of blocks whose peer is killed, after which vLLM gives them back."""
NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))


class Platform:
    """A machine with host memory only."""

    device_type = "cpu"

    def discover_numa_topology(self) -> list[list[int]]:
        return []

    def get_nixl_supported_devices(self) -> dict[str, tuple[str, ...]]:
        return {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False if name.startswith("is_") else None


class Cache:
    """As much of a tensor as the worker asks of a cache: [blocks, heads, tokens, bytes], contiguous."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape, self.ndim, self.nbytes = array.shape, array.ndim, array.nbytes

    def __getitem__(self, index: int) -> Cache:
        return Cache(self.array[index])

    def stride(self, axis: int | None = None) -> Any:
        return self.array.strides if axis is None else self.array.strides[axis]

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.nbytes)


class Backend:
    """The attention's backend, of which only the name is used."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


def worker(mode: str, engine: str, caches: list[Any]) -> tuple[Any, ModuleType]:
    """vLLM's worker that pulls or pushes, for these caches, and its module of metadata."""
    package("vllm", SITE).__version__ = "0.33.0"
    here = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    with importing(*ABSENT):
        platforms = importlib.import_module("vllm.platforms")
        platforms.current_platform = Platform()
        kind = getattr(importlib.import_module(f"{here}.{mode}_worker"), f"Nixl{mode.title()}ConnectorWorker")
        base = importlib.import_module(f"{here}.base_worker")
        metadata = importlib.import_module(f"{here}.metadata")
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        hashing = importlib.import_module("vllm.config.utils")
        hashing.hash_factors = lambda factors: repr(sorted(factors.items()))
    # What the model would say.
    base.get_current_attn_backends = lambda _: [Backend]
    base.get_current_attn_backends_and_specs = lambda *_: ([], [])
    base.select_common_block_size = lambda size, *_: size
    base.get_tensor_model_parallel_rank = lambda: 0
    base.get_tensor_model_parallel_world_size = lambda: 1
    page = HEADS * TOKENS * HEAD_BYTES
    spec = interface.FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_BYTES // 2, dtype=None, state_content_bytes=HEAD_BYTES
    )
    if spec.page_size_bytes != page:
        raise AssertionError(f"a page of {spec.page_size_bytes} bytes, not {page}")
    group = interface.KVCacheGroupSpec(list(NAMES), spec)
    config = Config(
        kv_transfer_config=Config(
            get_from_extra_config=lambda _, default: default, kv_buffer_device="cpu", kv_role="kv_both"
        ),
        parallel_config=Config(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        model_config=Config(
            model="a model",
            use_mla=False,
            get_total_num_kv_heads=lambda: HEADS,
            get_head_size=lambda: HEAD_BYTES // 2,
            get_total_num_hidden_layers=lambda: LAYERS,
        ),
        cache_config=Config(
            block_size=TOKENS, get_resolved_kv_cache_layout=lambda: SimpleNamespace(name="LBHNC"), cache_dtype="fp8"
        ),
        scheduler_config=Config(disable_hybrid_kv_cache_manager=True),
    )
    made = kind(config, engine, interface.KVCacheConfig(BLOCKS, [], [group]))
    made.register_kv_caches({name: Cache(cache) for name, cache in zip(NAMES, caches, strict=True)})
    return made, metadata


def content() -> list[Any]:
    """What the prefill end has in every layer."""
    random = np.random.default_rng(7)
    return [random.integers(1, 256, (BLOCKS, HEADS, TOKENS, HEAD_BYTES), dtype=np.uint8) for _ in range(LAYERS)]


def blocks_of(request: int) -> tuple[Any, Any]:
    """The blocks that a request has at the prefill end, and those it gets."""
    there = (np.arange(TAKEN) * 5 + request) % BLOCKS
    return there, np.arange(TAKEN)[::-1] + request * TAKEN


def serve(made: Any) -> None:
    """Has a thread answer handshakes, as the scheduler's listener does."""
    payload = msgspec.msgpack.encode(made.xfer_handshake_metadata)
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{OWN_PORT}")

    def answer() -> None:
        while True:
            identity, _, _ = socket.recv_multipart()
            socket.send_multipart((identity, b"", payload, msgspec.msgpack.encode(time.perf_counter())))

    threading.Thread(target=answer, daemon=True).start()


def compare(buffers: list[Any], expected: list[Any], request: int) -> None:
    """Every byte, after this request came."""
    there, here = blocks_of(request)
    for cache, whole in zip(expected, content(), strict=True):
        cache[here] = whole[there]
    for layer, (found, wanted) in enumerate(zip(buffers, expected, strict=True)):
        if not np.array_equal(found, wanted):
            raise AssertionError(f"layer {layer} differs after request {request}")


def asked_for(metadata: ModuleType, name: str, here: Any, there: Any, prefill: str) -> Any:
    """Metadata of the decode scheduler: a request waits for these blocks. ``there`` is empty if the peer pushes."""
    asked = metadata.NixlConnectorMetadata()
    parameters = {
        "remote_block_ids": there,
        "remote_engine_id": "prefill",
        "remote_request_id": prefill,
        "remote_host": "127.0.0.1",
        "remote_port": PORT,
        "tp_size": 1,
    }
    asked.add_new_req_to_recv(name, (here.tolist(),), parameters, awaiting_kvs=True)
    return asked


def until_received(made: Any, metadata: ModuleType, name: str) -> Any:
    """The results in which this request has ended."""
    results: list[Any] = []

    def step() -> bool:
        made.start_load_kv(metadata.NixlConnectorMetadata())
        results.append(made.get_transfer_results())
        return name in results[-1].finished_recving

    until(step, "receiving")
    return results[-1]


def prefill() -> None:
    """Keeps the blocks of every request until the decode end has them."""
    made, metadata = worker("pull", "prefill", content())
    serve(made)
    given = metadata.NixlConnectorMetadata()
    names = {f"prefill-{name}" for name in REQUESTS}
    given.reqs_in_batch |= names
    given.reqs_to_send |= {name: time.perf_counter() + LIMIT_S for name in names}
    made.start_load_kv(given)
    print("ready", flush=True)
    sent: set[str] = set()

    def step() -> bool:
        sent.update(made.get_finished()[0])
        return sent == names

    until(step, "sending")
    print("sent", flush=True)
    sys.stdin.read()


def decode() -> None:
    """Pulls the blocks of every request, and compares all that there is afterwards."""
    buffers = [np.zeros_like(one) for one in content()]
    expected = [np.zeros_like(one) for one in buffers]
    made, metadata = worker("pull", "decode", buffers)
    for name in REQUESTS:
        request = int(name.rstrip("!"))
        there, here = blocks_of(request)
        if name.endswith("!"):
            print("ready", flush=True)
            sys.stdin.readline()
        wanted = f"decode-{request}"
        made.start_load_kv(asked_for(metadata, wanted, here, (there.tolist(),), f"prefill-{request}"))
        failed = until_received(made, metadata, wanted).failed_recving
        if name.endswith("!"):
            if failed != {wanted} or made.get_block_ids_with_load_errors() != set(here.tolist()):
                raise AssertionError(f"the request of a dead peer has not failed by its blocks: {failed}")
            continue
        if failed:
            raise AssertionError(f"{failed} failed")
        compare(buffers, expected, request)
    print("received", flush=True)


def push() -> None:
    """Pushes the blocks of every request, each when the last one is done with."""
    made, metadata = worker("push", "prefill", content())
    serve(made)
    for name in REQUESTS:
        request = f"request-{name.rstrip('!')}"
        sent: set[str] = set()

        def step(sent: set[str] = sent) -> None:
            sent.update(made.get_transfer_results().finished_sending)

        def registered(request: str = request) -> bool:
            step()
            return request in made._pending_d_registrations

        if name.endswith("!"):
            until(registered, "registration")
            print("ready", flush=True)
            sys.stdin.readline()
        there, _ = blocks_of(int(name.rstrip("!")))
        given = metadata.NixlConnectorMetadata()
        given.reqs_in_batch.add(request)
        given.reqs_to_send[request] = time.perf_counter() + (LEASE_S if name.endswith("!") else LIMIT_S)
        given.push_finished_blocks[request] = (there.tolist(),)
        made.start_load_kv(given)

        def over(sent: set[str] = sent, request: str = request, step: Any = step) -> bool:
            step()
            return request in sent and request not in made._sending_transfers

        until(over, "pushing")
        told = made.xfer_stats.clone_and_reset().data
        if bool(told["num_failed_transfers"]) != name.endswith("!"):
            raise AssertionError(f"request {name}: {told}")
    print("sent", flush=True)
    sys.stdin.read()


def pushed() -> None:
    """Registers every request with the prefill end, and compares all that there is when its blocks have come."""
    buffers = [np.zeros_like(one) for one in content()]
    expected = [np.zeros_like(one) for one in buffers]
    engine = f"decode at {OWN_PORT}"
    made, metadata = worker("push", engine, buffers)
    serve(made)
    for name in REQUESTS:
        request = int(name.rstrip("!"))
        wanted = f"request-{request}"
        _, here = blocks_of(request)
        asked = asked_for(metadata, wanted, here, (), wanted)
        asked.push_registrations[wanted] = {
            "request_id": wanted,
            "decode_engine_id": engine,
            "decode_host": "127.0.0.1",
            "decode_port": OWN_PORT,
            "decode_tp_size": 1,
            "local_block_ids": (here.tolist(),),
            "remote_engine_id": "prefill",
            "remote_host": "127.0.0.1",
            "remote_port": PORT,
            "remote_tp_size": 1,
            "remote_pp_size": 1,
        }
        made.start_load_kv(asked)
        if failed := until_received(made, metadata, wanted).failed_recving:
            raise AssertionError(f"{failed} failed")
        compare(buffers, expected, request)
    print("received", flush=True)


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode, "push": push, "pushed": pushed}[ROLE]()
    sys.stdout.flush()
    os._exit(0)
