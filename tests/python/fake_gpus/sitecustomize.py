"""Two GPUs for `crossrail bench ep --device cuda`, in processes that have this folder on their path: what the native
half does on a GPU is done in host memory by an ExpertBuffer, so that everything around it runs as it is.

FAKE_FLAW=RANK: the sums of that rank come out wrong in one bit.
"""

import json
import os
import time

import numpy as np

import crossrail
from crossrail import _native
from crossrail.ref import bits
from crossrail_tools.cli import placement
from crossrail_tools.verify.sampling import PERIOD

GROUPS = []
KEPT_INIT = crossrail.Group.__init__


def remembering(self, *arguments, **options):
    KEPT_INIT(self, *arguments, **options)
    GROUPS.append(self)


class FakeDeviceEp:
    """As `_native._DeviceEp`."""

    def __init__(self, group, context, name, parameters, on, x, topk_idx, topk_weights, outputs):
        hidden, topk = parameters["hidden"], parameters["topk"]
        self.layout = parameters["layouts"][0]
        self.on = on
        self.x = np.frombuffer(x, np.uint16).reshape(-1, hidden)
        self.idx = np.frombuffer(topk_idx, np.int64).reshape(-1, topk)
        self.weights = np.frombuffer(topk_weights, np.float32).reshape(-1, topk)
        self.outputs = np.frombuffer(outputs, np.uint16).reshape(-1, hidden)
        assert len(self.outputs) == PERIOD
        self.rank = GROUPS[-1].rank
        self.shares = parameters["share_node"]
        self.settings = context.settings()
        self.nodes = len({member.node for member in GROUPS[-1].members()})
        self.buffer = crossrail.ExpertBuffer(
            GROUPS[-1],
            parameters["max_tokens"],
            hidden,
            parameters["experts"],
            topk,
            parameters["dispatch_dtype"],
            scale=parameters["scale"],
            layouts=parameters["layouts"],
            prereduce=parameters["prereduce"],
            share_node=self.shares,
            name=name,
        )
        self.came = None

    def dispatch(self):
        self.came = came = self.buffer.dispatch(self.x, self.idx, self.weights, layout=self.layout)
        parts = {"counts": came.counts.tobytes()}
        x = bits(np.asarray(came.x))
        if self.layout == "rank":
            parts |= {"x": x.tobytes()}
            for name in ("offsets", "topk_idx", "topk_weights"):
                parts[name] = getattr(came, name).tobytes()
            return parts | ({} if came.scales is None else {"scales": came.scales.tobytes()})
        parts |= {"ranges": came.ranges.tobytes(), "source": came.source.tobytes()}
        parts["x"] = np.concatenate([x[local, :count] for local, count in enumerate(came.counts)]).tobytes()
        if came.scales is not None:
            parts["scales"] = np.ascontiguousarray(came.scales.transpose(0, 2, 1)).tobytes()
        return parts

    def combine(self):
        lead = self.came.x.shape[:-1]
        y = self.outputs[np.arange(int(np.prod(lead))) % PERIOD].reshape(*lead, self.outputs.shape[1])
        sums = bits(np.asarray(self.buffer.combine(y, self.came.handle).x)).copy()
        if os.environ.get("FAKE_FLAW") == str(self.rank):
            sums[0, 0] ^= 0x0100
        return sums.tobytes()

    def measure(self, plan, on_progress=None):
        plan, samples = json.loads(plan), []
        for _ in range(plan["warmup"] + plan["iters"]):
            began = time.perf_counter()
            self.buffer.sync()
            took = (time.perf_counter() - began) * 1e6 + (1000.0 if plan["clock"] == "host" else 0.0)
            # So much that the machine's other work makes no difference.
            samples.append(took + (2e4 if self.shares else 2e5))
        moved = {"logical": 3000, "wire": 2000, "network": 2000 if self.is_far() else 0}
        return json.dumps({"samples_us": samples[plan["warmup"] :], "bytes": moved})

    def is_far(self):
        return self.nodes > 1 or not self.shares

    def facts(self):
        """The second rank is reached by the settings and the nodes; `rails` would carry its rows."""
        facts = {"heap_bytes": 1 << 20, "num_sms": self.on["num_sms"] or 132}
        facts["send"] = "rank" if self.on["send"] == "auto" else self.on["send"]
        if not self.is_far():
            return facts | {"links": ["self", "heap"], "rails": {}}
        named = self.settings["CROSSRAIL_NODE"] is not None or self.settings["CROSSRAIL_TLS"] == "tcp"
        assert named, "ranks on different nodes would share memory"
        return facts | {"links": ["self", "network"], "rails": {"tcp/127.0.0.1": 1500, "tcp/127.0.0.2": 500}}

    def close(self):
        self.buffer.destroy()


crossrail.Group.__init__ = remembering
_native._DeviceEp = FakeDeviceEp
placement.known_gpus = lambda context, wanted: ["cuda:0", "cuda:1"]
