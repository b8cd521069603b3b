"""Reference implementation of expert parallelism in NumPy, readable and slow. All tests compare with it.

All ranks are simulated in one process: arguments and results are lists with one array per rank, and None for a rank
that is not active. It shares no code with the library. bf16 and fp8 values are represented by their bits (uint16 and
uint8), so that comparisons are exact; `bits` converts arrays that have such a dtype.

    shape = ref.Shape(ranks=4, max_tokens=128, hidden=256, num_experts=8, topk=2)
    routed = [ref.route("uniform", 128, shape, rng) for _ in range(4)]      # (topk_idx, topk_weights) of each rank
    received = ref.dispatch(shape, xs, [idx for idx, _ in routed])          # xs: bf16 bits [T, H] of each rank
    ys = [expert(one.x) for one in received]                                # bf16 bits, in the layout of one.x
    sums = ref.combine(ys, received[0].handle, [weights for _, weights in routed])

`exchange` has `dispatch`, `summing` has `combine` and its error bound, `casting` and `floats` have the casts, and
`routing` has the routings.
"""

from crossrail.ref.casting import BLOCK, SCALES, Scale, cast_rows, uncast_rows
from crossrail.ref.exchange import Dispatched, Handle, Layout, Traffic, dispatch, traffic
from crossrail.ref.floats import bf16_bits, bf16_values, bits, e4m3_bits, e4m3_values
from crossrail.ref.routing import ROUTINGS, Shape, parse_routing, route
from crossrail.ref.summing import combine, combine_exact

__all__ = [
    "BLOCK",
    "ROUTINGS",
    "SCALES",
    "Dispatched",
    "Handle",
    "Layout",
    "Scale",
    "Shape",
    "Traffic",
    "bf16_bits",
    "bf16_values",
    "bits",
    "cast_rows",
    "combine",
    "combine_exact",
    "dispatch",
    "e4m3_bits",
    "e4m3_values",
    "parse_routing",
    "route",
    "traffic",
    "uncast_rows",
]
