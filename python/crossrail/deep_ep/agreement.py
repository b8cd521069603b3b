"""Agreement of the ranks on normal dispatches with a new routing: their parameters and the buffer's capacity."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

from crossrail._experts_device import NO_REPORT
from crossrail._untrusted import of_rank, parsing
from crossrail.deep_ep.arguments import Inputs, no_rows
from crossrail.deep_ep.checks import Tensor, wrong
from crossrail.deep_ep.layouts import aligned_counts
from crossrail.deep_ep.pool import PAYLOADS, Backend, Kind, Pool, SizedBuffer
from crossrail.deep_ep.ranks import Ranks
from crossrail.errors import CrossrailError, MismatchError, TimeoutError, UsageError

__all__ = ["BY_RANKS", "Call", "DispatchRequest", "Dispatches"]

BY_RANKS = 2
"""`Call.routed` if only is_token_in_rank is known, not the experts."""
LISTEN = 1
"""Bit of a host word that makes the other ranks exchange their calls. The remaining bits are `routed`."""


@dataclass(frozen=True)
class Call:
    """Parameters that must be equal on all ranks, and the capacity that this rank needs (`wanted`, tokens). `late`: a
    rank timed out in the dispatch that this one has started."""

    hidden: int = 0
    experts: int = 0
    topk: int = 0
    payload: int = 0
    routed: int = 0
    worst: int = 0
    wanted: int = 0
    late: int = 0

    _FORM: ClassVar = struct.Struct("<8qH400s")

    @staticmethod
    def of(kind: Kind, routed: int = 0, worst: int = 0, wanted: int = 0, late: int = 0) -> Call:
        """`routed`: by ids (0), by ids with weights (1), `BY_RANKS`."""
        payload = PAYLOADS.index(kind.payload)
        return Call(kind.hidden, kind.experts, kind.topk, payload, routed, worst, wanted, late)

    @property
    def fast_kind(self) -> Kind | None:
        """The kind of expert buffer that the rank dispatches into before agreement; None if it agrees first."""
        if not self.hidden or self.worst or self.routed == BY_RANKS:
            return None
        return Kind("rank", self.hidden, self.experts, self.topk, PAYLOADS[self.payload])

    def exchange(self, ranks: Ranks, why: str = "") -> list[PeerCall]:
        """All-gathers the ranks' calls. `why`: the error of this rank's call, empty if it is valid."""
        text = why.encode()[:400]
        calls = []
        for rank, message in enumerate(ranks.exchange(self._FORM.pack(*astuple(self), len(text), text))):
            with parsing(of_rank("dispatch", rank, message)):
                *numbers, length, error = self._FORM.unpack(message)
                calls.append(PeerCall(Call(*numbers), error[:length].decode(errors="replace")))
        return calls

    def agreed(self, calls: Iterable[PeerCall]) -> int:
        """The largest `wanted` of all ranks. Raises MismatchError, or UsageError if another rank's call is invalid."""
        most = self.wanted
        for rank, (call, why) in enumerate(calls):
            if why:
                raise UsageError(f"dispatch: rank {rank} could not: {why}", operation="dispatch", detail=why)
            for name, what in _WHAT.items():
                if getattr(self, name) != getattr(call, name):
                    detail = f"{what} is {getattr(self, name)} here and {getattr(call, name)} on rank {rank}"
                    raise MismatchError(f"dispatch: {detail}", operation="dispatch", detail=detail)
            most = max(most, call.wanted)
        return most


class PeerCall(NamedTuple):
    """A rank's call, and its error (empty if valid)."""

    call: Call
    why: str


_WHAT = {
    "hidden": "the hidden size of x",
    "experts": "the number of experts",
    "topk": "the number of experts of a token",
    "payload": "the kind of x (0: bf16, 1: fp8 with f32 scales, 3: with packed ones)",
    "routed": "the form of the routing (0: topk_idx, 1: with topk_weights, 2: is_token_in_rank)",
    "worst": "num_worst_tokens",
}


@dataclass
class DispatchRequest:
    """A dispatch that was validated locally. `rows`: rows (with scales), ids, weights or None; `per_expert`: tokens per
    expert, used without ids; `num_sms`: for an expert buffer that must be created."""

    kind: Kind
    routed: int
    worst: int
    rows: tuple[Any, Tensor, Any]
    per_expert: Tensor
    alignment: int
    num_sms: int

    @property
    def tokens(self) -> int:
        return len(self.rows[1])


@dataclass
class Started:
    """An enqueued dispatch: its expert buffer, result, and rows per expert if the host knows them."""

    made: SizedBuffer
    result: Any
    counts: list[int]


class Dispatches:
    """Dispatches of a buffer. Every rank makes the same ones in the same order.

    The fast path has no host communication: a dispatch starts at once, and its kernels deliver every rank's host word
    to the hosts, which wait for the row counts anyway; the word says whether the ranks must exchange their calls."""

    def __init__(self, ranks: Ranks, backend: Backend, pool: Pool) -> None:
        self._ranks = ranks
        self._backend = backend
        self._pool = pool
        self._settled: set[tuple[Kind, int]] = set()
        self._last: Kind | None = None

    def dispatch(self, request: DispatchRequest) -> Started:
        """Dispatches. Raises UsageError that names a rank whose call is invalid, MismatchError, TimeoutError."""
        self._ranks.next_call()
        if not request.worst and request.routed != BY_RANKS:
            self._last = request.kind
            if (made := self._pool.made(request.kind)) is not None:
                return self._fast_path(request, made)
        made = self._agreed(request)
        counts = None
        if request.routed == BY_RANKS and not request.worst:
            counts = aligned_counts(self._ranks, request.per_expert, request.alignment)
        return self._begun(request, made, counts)

    def prepared(self, given: Inputs, alignment: Any, *, apart: bool) -> tuple[Kind, SizedBuffer, Any, bool] | None:
        """Dispatches in one native call; None, with nothing enqueued, if the arguments need the general path. `apart`:
        not in the stream of the caller's own work. Returns the result of `RankCalls.dispatch`, and whether all host
        words agree; if not, `redispatch` must follow."""
        x, topk_idx, topk_weights, per_expert = given.x, given.topk_idx, given.topk_weights, given.per_expert
        host_word = 2 * int(topk_weights is not None)
        for kind, made in self._pool.of_rank_layout():
            if made.calls is None:
                continue
            try:
                begun = made.calls.dispatch(x, topk_idx, topk_weights, None, per_expert, 0, alignment, host_word, apart)
            except BaseException:  # the other ranks are in this collective call: keep the tags in step
                self._ranks.next_call()
                raise
            if begun is not None:
                self._ranks.next_call()
                self._last = kind
                reported: Any = begun[6]
                return kind, made, begun, all(word == host_word for word in reported[1])
        return None

    def _begun(self, request: DispatchRequest, made: SizedBuffer, counts: list[int] | None = None) -> Started:
        """Dispatches after all ranks have agreed."""
        rows, worst = request.rows, request.worst or None
        result = made.buffer.dispatch(*rows, "rank", expert_alignment=request.alignment, max_rows=worst)
        return Started(made, result, counts or result.count_list or [])

    def _agreed(self, request: DispatchRequest) -> SizedBuffer:
        """The expert buffer for a dispatch that starts after agreement: the first of its kind, or one without ids.
        Dispatches with `worst` agree only once, because their host must not wait."""
        kind, worst, tokens = request.kind, request.worst, request.tokens
        made = self._pool.made(kind)
        if made is not None and (kind, worst) in self._settled:
            if tokens > made.max_tokens:
                detail = f"x has {tokens} tokens, and with num_worst_tokens {worst} there is room for {made.max_tokens}"
                raise wrong("dispatch", detail, "there is room for num_worst_tokens / ranks, or for the first call's x")
            return made
        call = Call.of(kind, request.routed, worst, max(tokens, -(-worst // self._ranks.size)))
        most = self._exchange(call, None)
        if worst:
            self._settled.add((kind, worst))
        return self._pool.rank_layout(kind, most, request.num_sms)

    def _fast_path(self, request: DispatchRequest, made: SizedBuffer) -> Started:
        """Dispatches before agreement (the fast path).

        A rank with more tokens than fit dispatches none, so that the others complete, and sets `LISTEN` in its host
        word; then all ranks dispatch again into a larger buffer."""
        kind, alignment, fits = request.kind, request.alignment, request.tokens <= made.max_tokens
        rows = request.rows if fits else no_rows(kind, self._backend.device)
        host_word = 2 * request.routed + (0 if fits else LISTEN)
        result = self._backend.dispatch(made, rows, alignment, host_word, counted=True)
        if all(word == host_word for word in result.host_words) and fits:
            return Started(made, result, result.count_list)
        host_words = result.host_words
        del result
        return self.redispatch(request, host_words)

    def redispatch(self, request: DispatchRequest, host_words: list[int]) -> Started:
        """Repeats the dispatch after all ranks have exchanged their calls. `host_words`: those of the first one,
        whose result must not be referenced any more."""
        kind = request.kind
        lost = [rank for rank, word in enumerate(host_words) if word == NO_REPORT]
        most = self._exchange(Call.of(kind, request.routed, 0, request.tokens, int(bool(lost))), kind)
        if lost:
            detail = f"rank {lost[0]} timed out"
            hint = "the next dispatch creates a new expert buffer, and works once all ranks take part in it"
            raise TimeoutError(f"dispatch: {detail}; {hint}", operation="dispatch", detail=detail, hint=hint)
        return self._begun(request, self._pool.rank_layout(kind, most, request.num_sms))

    def _exchange(self, call: Call, begun: Kind | None) -> int:
        """Exchanges calls. Returns the capacity in tokens that all ranks need. `begun`: the kind dispatched here."""
        calls = call.exchange(self._ranks)
        try:
            return call.agreed(calls)
        finally:
            self._join_started(calls, begun)

    def refuse(self, worst: Any, why: str) -> None:
        """Reports an invalid call of this rank to the others, unless it is one that was agreed on before."""
        self._ranks.next_call()
        if any(worst == one for _, one in self._settled):
            return
        call, begun = Call(), None
        agrees_first = isinstance(worst, int) and worst > 0
        if not agrees_first and self._last is not None and self._pool.made(self._last) is not None:
            self._join_empty(self._last)  # most likely the dispatch that the others have started
            call, begun = Call.of(self._last), self._last
        with contextlib.suppress(CrossrailError):  # the caller raises its own error
            self._join_started(call.exchange(self._ranks, why), begun)

    def _join_started(self, calls: list[PeerCall], begun: Kind | None) -> None:
        """Joins the dispatch that other ranks have started, so that it completes and no rank is lost. Expert buffers
        whose operation a rank missed are dropped, and created again when they are next needed."""
        kinds = {kind for peer in calls if (kind := peer.call.fast_kind) is not None and self._pool.made(kind)}
        if len(kinds) > 1 or any(peer.call.late for peer in calls):
            for kind in kinds:
                self._pool.drop(kind)
        elif kinds - {begun}:
            self._join_empty(*kinds)

    def _join_empty(self, kind: Kind) -> None:
        """Joins a dispatch of the others without tokens, with `LISTEN` set."""
        if (made := self._pool.made(kind)) is not None:
            with contextlib.suppress(CrossrailError):
                self._backend.dispatch(made, no_rows(kind, self._backend.device), 1, LISTEN, counted=False)
