"""A KV cache of one rank of two pulls blocks from the cache of a process that holds all heads: `kv_cache.py`."""

import subprocess
import sys

import numpy as np

import crossrail
from crossrail.kv import PagedCache

LAYERS, PAGES, TOKENS, HEADS, DIM = 4, 64, 16, 8, 32
with crossrail.Worker(crossrail.Context(), admit=True) as worker:
    if sys.argv[1:]:  # decode: heads 4 to 7 of 8
        layers = [np.zeros((PAGES, TOKENS, HEADS // 2, DIM), np.float16) for _ in range(LAYERS)]
        cache = PagedCache(worker, layers, head_axis=2, shard=(1, 2))
        remote = cache.remote(bytes.fromhex(sys.argv[1]))
        receipt = remote.borrow(bytes.fromhex(sys.argv[2])).pull([10, 11, 12], notice=b"request 1").wait()
        print(
            receipt.bytes, "bytes of blocks 5, 3 and 8:", [float(layers[0][block, 0, 0, 0]) for block in (10, 11, 12)]
        )
    else:  # prefill: each page has its number in it
        layers = [np.full((PAGES, TOKENS, HEADS, DIM), np.arange(PAGES)[:, None, None, None], np.float16)] * LAYERS
        cache = PagedCache(worker, [layer.copy() for layer in layers], head_axis=2)
        with cache.lend([5, 3, 8]) as lease:  # at its end the blocks may be used again
            described = [cache.describe(access=False).hex(), bytes(lease).hex()]
            code = subprocess.call([sys.executable, __file__, *described])
        print(worker.notices())
        sys.exit(code)
