"""Expert parallelism for programs written against DeepEP: `import crossrail.deep_ep as deep_ep`.

The same `Buffer`, `Config` and `EventOverlap` as its first version, with tensors of PyTorch on a GPU, on top of
`crossrail.ExpertBuffer`: normal mode (`dispatch`, `combine`) for prefill and training, low-latency mode for decode; and
`ElasticBuffer` with `EPHandle` as the second version. Neither NVSHMEM, NCCL nor a network card is needed. Each method
documents its differences; unsupported arguments raise NotImplementedError that names them.

Thread safety: any thread may use an object, one thread at a time. Sizes are in bytes where a name says bytes, and
elsewhere in elements, rows or tokens.

PyTorch is imported when the first buffer is made, or `topk_idx_t` is asked for.
"""

from typing import Any

from crossrail import _native
from crossrail.deep_ep.buffer import Buffer
from crossrail.deep_ep.checks import torch
from crossrail.deep_ep.config import Config
from crossrail.deep_ep.elastic import ElasticBuffer, EPHandle
from crossrail.deep_ep.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]

__version__ = f"2.1.0+crossrail.{_native.__version__}"
"""Version of DeepEP whose interface this is, and of this library."""


def __getattr__(name: str) -> Any:
    """`topk_idx_t`: the dtype of expert ids, torch.int64."""
    if name == "topk_idx_t":
        return torch().int64
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
