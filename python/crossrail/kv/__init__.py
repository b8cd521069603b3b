"""Paged KV caches as objects: pull and push of blocks, leases of blocks, and weights spread to many.

    cache = PagedCache(worker, layers, head_axis=2, shard=(rank, size))      # at both ends
    remote = cache.remote(described)                                         # result of the peer's describe()
    remote.pull(blocks, their_blocks, notice=b"request 1").wait()

    receiver = Receiver(context, tensors)                                    # at the receivers
    spread(context, tensors, descriptions)       # at the source: their describe(), while they run receive()

Any thread may use an object; a `Receiver` is for one. The contract, with what is guaranteed when peers die and blocks
are freed: docs/design/kv-caches.md.
"""

from __future__ import annotations

from crossrail.kv._cache import LayerPush, Lease, PagedCache, RemoteCache
from crossrail.kv._spread import Receiver, Spread, spread

__all__ = ["LayerPush", "Lease", "PagedCache", "Receiver", "RemoteCache", "Spread", "spread"]
