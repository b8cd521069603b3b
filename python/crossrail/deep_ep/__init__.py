"""Expert parallelism for programs written against DeepEP's first version: `import crossrail.deep_ep as deep_ep`.

The same `Buffer`, `Config` and `EventOverlap`, with tensors of PyTorch on a GPU, on top of `crossrail.ExpertBuffer`:
normal mode (`dispatch`, `combine`) for prefill and training, low-latency mode for decode. Neither NVSHMEM nor a network
card is needed. What differs is said at each method; what cannot be had raises NotImplementedError that names the
argument.

PyTorch is imported when the first buffer is made.
"""

from crossrail.deep_ep.buffer import Buffer
from crossrail.deep_ep.config import Config
from crossrail.deep_ep.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
