"""Expert parallelism for programs written against DeepEP's first version: `import crossrail.deep_ep as deep_ep`.

The same `Buffer`, `Config` and `EventOverlap`, with tensors of PyTorch on a GPU, on top of `crossrail.ExpertBuffer`:
normal mode (`dispatch`, `combine`) for prefill and training, low-latency mode for decode. Neither NVSHMEM nor a network
card is needed. What differs is said at each method; what cannot be had raises NotImplementedError that names the
argument.

PyTorch is imported when the first buffer is made, or `topk_idx_t` is asked for.
"""

from typing import Any

from crossrail import _native
from crossrail.deep_ep.buffer import Buffer
from crossrail.deep_ep.checks import torch
from crossrail.deep_ep.config import Config
from crossrail.deep_ep.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]

__version__ = f"1.2.1+crossrail.{_native.__version__}"
"""Version of DeepEP whose interface this is, and of this library."""


def __getattr__(name: str) -> Any:
    """`topk_idx_t`: the dtype of expert ids, torch.int64."""
    if name == "topk_idx_t":
        return torch().int64
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
