"""One rank of the peers of `crossrail bench ep --device cuda`; what it runs is `crossrail._gpu_peers`."""

from __future__ import annotations

from crossrail.ref import Shape
from crossrail.ref.checking import Work

from .failure import Failure
from .rank_process import Parent
from .ranks import Message


def serve(parent: Parent, job: Message) -> None:
    """Does what the command says until it is ended. Raises Failure where there is no PyTorch."""
    try:
        from crossrail import _gpu_peers
    except ImportError as error:
        raise Failure(f"peers need PyTorch with CUDA and NCCL: {error}") from None
    try:
        with _gpu_peers.Rank(job["rank"], job["size"], job["folder"], job["peers"]) as rank:
            while (request := parent.hear())["do"] != "end":
                if request["do"] == "open":
                    work = Work(**{**request["work"], "shape": Shape(**request["work"]["shape"])})
                    parent.tell("opened", **rank.open(work, request["num_sms"]))
                elif request["do"] == "measure":
                    told = rank.measure(request["modes"], request["iters"], request["warmup"], last=request["last"])
                    parent.tell("measured", **told)
    except Exception as error:  # whatever their code may raise
        if isinstance(error, Failure):
            raise
        raise Failure(f"peers: {_gpu_peers.reason(error)}") from None
