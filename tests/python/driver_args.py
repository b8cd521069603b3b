"""Operations in the rank layout on the driver without a GPU, prepared and in the general way: prints, as JSON, whether
both gave the kernels the same arguments.

    LD_LIBRARY_PATH=FOLDER python driver_args.py FOLDER [table]

`table`: tensors are looked at by a table of C functions, as of PyTorch from 2.10 on, not by their attributes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from driver_ranks import DriverTensors, prepare
from exchange_table import ATTRIBUTE, Table
from host_torch import torch

from crossrail import ExpertBuffer, Group

EXPERTS, MOST, TOPK, HIDDEN = 8, 4, 2, 512
TOKENS = 3
made: dict[Any, Any] = {}


def remembered(*shape: Any, dtype: Any = torch.float32, device: Any = None) -> Any:
    """`torch.empty` that gives the same tensor again, so that addresses do not differ."""
    key = (shape, dtype)
    if key not in made:
        made[key] = plain_empty(*shape, dtype=dtype)
    return made[key]


plain_empty = torch.empty


def tensors() -> dict[str, Any]:
    """What operations are given."""
    wide = torch.ones(TOKENS, 2 * HIDDEN // 128)
    return {
        "bf16": torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "bf16 apart": torch.ones(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN],
        "fp8": torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "f32": torch.ones(TOKENS, HIDDEN // 128),
        "f32 in columns": torch.ones(HIDDEN // 128, TOKENS).t(),
        "f32 apart": wide[:, : HIDDEN // 128],
        "ue8m0": torch.ones(TOKENS, HIDDEN // 512, dtype=torch.int32),
        "ids": torch.zeros(TOKENS, TOPK, dtype=torch.int64),
        "small ids": torch.zeros(TOKENS, TOPK, dtype=torch.int32),
        "weights": torch.ones(TOKENS, TOPK),
        "stats": torch.zeros(EXPERTS, dtype=torch.int32),
        "bias": torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "other bias": torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16),
    }


DISPATCHES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    # Rows, their scales, and what else is given.
    "bf16": ("bf16", None, {}),
    "bf16 apart": ("bf16 apart", None, {}),
    "with ids of 32 bits": ("bf16", None, {"topk_idx": "small ids"}),
    "with weights, stats and alignment": (
        "bf16",
        None,
        {"topk_weights": "weights", "stats": "stats", "expert_alignment": 16},
    ),
    "of so many rows": ("bf16", None, {"max_rows": MOST}),
    "f32": ("fp8", "f32", {"topk_weights": "weights"}),
    "f32 in columns": ("fp8", "f32 in columns", {"max_rows": MOST}),
    "f32 apart": ("fp8", "f32 apart", {}),
    "cast to fp8": ("bf16", "", {}),
    "ue8m0": ("fp8", "ue8m0", {"topk_weights": "weights"}),
}
COMBINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"topk_weights": True},
    "one bias": {"bias": "bias"},
    "two biases": {"bias": ["bias", "other bias"], "topk_weights": True},
}


def both(buffer: ExpertBuffer, call: Any, last: Any) -> str:
    """How the two ways of a call differ."""
    operations: Any = buffer._operations
    used: list[str] = []

    def noted(name: str, method: Any) -> Any:
        def result(*given: Any) -> Any:
            done = method(*given)
            used.append(f"{name} {'prepared' if done is not None else 'refused'}")
            return done

        return result

    seen = []
    for way in ("prepared", "general"):
        names = ("_rank_prepared", "_combine_prepared")
        for name in names:
            method = noted(name, getattr(operations, name)) if way == "prepared" else lambda *given: None
            operations.__dict__[name] = method
        shapes = call()
        for name in names:
            del operations.__dict__[name]
        seen.append((bytes(last), shapes))
    if used[-1:] and "refused" in used[-1]:
        return used[-1]
    if not used:
        return "was not asked"
    if seen[0][1] != seen[1][1]:
        return f"gave {seen[0][1]}, and generally {seen[1][1]}"
    different = [at for at, (one, other) in enumerate(zip(seen[0][0], seen[1][0], strict=True)) if one != other]
    return f"bytes {different} differ" if different else "same"


def main() -> None:
    table = Table()
    setattr(torch.Tensor, ATTRIBUTE, table.capsule if sys.argv[2:] == ["table"] else None)
    prepare()
    ctypes.CDLL(f"{sys.argv[1]}/libnvrtc.so.13")
    driver = ctypes.CDLL("libcuda.so.1")
    last = {name: (ctypes.c_ubyte * (1 << 12)).in_dll(driver, f"last_{name}") for name in ("dispatch", "combine")}
    given, said = tensors(), {}
    for payload in ("bf16", "f32", "ue8m0"):
        kind: dict[str, Any] = {"dispatch_dtype": "fp8" if payload != "bf16" else "bf16"}
        kind["scale"] = "ue8m0" if payload == "ue8m0" else "f32"
        buffer = ExpertBuffer(
            Group(size=1), MOST, HIDDEN, EXPERTS, TOPK, **kind, device="cuda:0", layouts=["rank"], regions=2
        )
        arrays = DriverTensors()
        buffer._operations.arrays_of = lambda value, arrays=arrays: arrays  # type: ignore[method-assign,union-attr,misc]
        torch.empty = remembered
        for name, (rows, scales, rest) in DISPATCHES.items():
            if payload != ("bf16" if scales is None else "ue8m0" if scales == "ue8m0" else "f32"):
                continue
            x = (given[rows], given[scales]) if scales else given[rows]
            rest = {key: given[value] if isinstance(value, str) else value for key, value in rest.items()}
            rest = {"topk_idx": given["ids"]} | rest

            def dispatch(x: Any = x, rest: Any = rest, buffer: Any = buffer) -> list[Any]:
                result = buffer.dispatch(x, layout="rank", **rest)
                parts = (result.x, result.scales, result.topk_idx, result.topk_weights, result.counts, result.offsets)
                return [None if part is None else (str(part.dtype), tuple(part.shape)) for part in parts]

            said[f"dispatch {name}"] = both(buffer, dispatch, last["dispatch"])
        result = buffer.dispatch(given["bf16"], given["ids"], given["weights"], "rank")
        y = (torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.empty(TOKENS, TOPK))
        for name, options in COMBINES.items():
            bias = options.get("bias")
            biases = [given[one] for one in bias] if isinstance(bias, list) else bias and given[bias]

            weights = y[1] if "topk_weights" in options else None
            rest = {"topk_weights": weights, "bias": biases}

            def combine(rest: Any = rest, y: Any = y[0], buffer: Any = buffer, of: Any = result) -> Any:
                summed = buffer.combine(y, of.handle, **rest)
                return tuple(summed.x.shape), summed.topk_weights is not None

            said[f"combine {payload}, {name}"] = both(buffer, combine, last["combine"])
        del result
        torch.empty = plain_empty
        buffer.destroy()
    assert bool(table.looks) == (sys.argv[2:] == ["table"])
    print(json.dumps(said))


if __name__ == "__main__":
    main()
