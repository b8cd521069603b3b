"""What expert parallelism means, in NumPy, readable and slow: the judge of every test.

All ranks live in one process: arrays per rank go in as a list, arrays per rank come out, and a rank that is not there
is `None`. It shares no code with the library. bf16 and fp8 values are handled as their bits (uint16 and uint8), so that
equal means equal in every bit; `bits` takes what has such a dtype by name.

    shape = ref.Shape(ranks=4, max_tokens=128, hidden=256, num_experts=8, topk=2)
    routed = [ref.route("uniform", 128, shape, rng) for _ in range(4)]      # (topk_idx, topk_weights) of each rank
    came = ref.dispatch(shape, xs, [idx for idx, _ in routed])              # xs: bf16 bits [T, H] of each rank
    ys = [expert(one.x) for one in came]                                    # bf16 bits, as laid out in one.x
    sums = ref.combine(ys, came[0].handle, [weights for _, weights in routed])

`dispatch` is in `exchange`, `combine` and its error bound in `summing`, the casts in `casting` and `floats`, the
routings in `routing`.
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
