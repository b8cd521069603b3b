"""How the ranks keep step in normal dispatches whose routing is new: they agree about the call, and about the room."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, ClassVar, NamedTuple

from crossrail._experts_device import NO_REPORT
from crossrail.deep_ep.checks import Tensor, wrong
from crossrail.deep_ep.given import Inputs, no_rows
from crossrail.deep_ep.layouts import aligned_counts
from crossrail.deep_ep.pool import PAYLOADS, Kind, Machine, Made, Pool
from crossrail.deep_ep.ranks import Ranks
from crossrail.errors import CrossrailError, MismatchError, TimeoutError, UsageError

__all__ = ["BY_RANKS", "Call", "Dispatches", "Wanted"]

BY_RANKS = 2
"""`Call.routed` where only which rank gets which token is known."""
LISTEN = 1
"""What a rank says to the others' hosts by the kernels: they must hear more. `routed`, doubled, is added."""


@dataclass(frozen=True)
class Call:
    """What the ranks must agree about, and the most tokens that any of them wants room for. `late`: a rank did not come
    to what this one has begun."""

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
    def begins_with(self) -> Kind | None:
        """The kind of the expert buffer in which the rank begins before all have agreed, if there is one."""
        if not self.hidden or self.worst or self.routed == BY_RANKS:
            return None
        return Kind("rank", self.hidden, self.experts, self.topk, PAYLOADS[self.payload])

    def told(self, ranks: Ranks, why: str = "") -> list[Said]:
        """What each rank says of its call, this being the one here, and `why` what is wrong with it."""
        text = why.encode()[:400]
        said = []
        for message in ranks.exchange(self._FORM.pack(*astuple(self), len(text), text)):
            *numbers, length, heard = self._FORM.unpack(message)
            said.append(Said(Call(*numbers), heard[:length].decode(errors="replace")))
        return said

    def agreed(self, said: Iterable[Said]) -> int:
        """The largest `wanted` of all ranks. Raises MismatchError, or UsageError for a call that is wrong elsewhere."""
        most = self.wanted
        for rank, (there, why) in enumerate(said):
            if why:
                raise UsageError(f"dispatch: rank {rank} could not: {why}", operation="dispatch", detail=why)
            for name, what in _WHAT.items():
                if getattr(self, name) != getattr(there, name):
                    detail = f"{what} is {getattr(self, name)} here and {getattr(there, name)} on rank {rank}"
                    raise MismatchError(f"dispatch: {detail}", operation="dispatch", detail=detail)
            most = max(most, there.wanted)
        return most


class Said(NamedTuple):
    """A rank's call, and what is wrong with it."""

    call: Call
    why: str


_WHAT = {
    "hidden": "the hidden size of x",
    "experts": "the number of experts",
    "topk": "the number of experts of a token",
    "payload": "the kind of x (0: bf16, 1: fp8 with f32 scales, 3: with packed ones)",
    "routed": "what says where tokens go (0: topk_idx, 1: with topk_weights, 2: is_token_in_rank)",
    "worst": "num_worst_tokens",
}


@dataclass
class Wanted:
    """A dispatch that is right as far as it can be seen here. `rows`: rows (with scales), ids, weights or None;
    `per_expert`: tokens of each expert, for one without ids; `num_sms`: of an expert buffer that must be made."""

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
    """A dispatch that was enqueued, of which expert buffer; the rows of each expert, if the host knows."""

    made: Made
    result: Any
    counts: list[int]


class Dispatches:
    """Dispatches of a buffer. Every rank makes the same ones in the same order.

    Usually the ranks' hosts don't talk to each other: a dispatch begins at once, and its kernels tell the hosts, which
    wait for the number of rows anyway, whether a rank has more to say.
    """

    def __init__(self, ranks: Ranks, machine: Machine, pool: Pool) -> None:
        self._ranks = ranks
        self._machine = machine
        self._pool = pool
        self._settled: set[tuple[Kind, int]] = set()
        self._last: Kind | None = None

    def dispatch(self, wanted: Wanted) -> Started:
        """Raises UsageError for a call that is wrong on another rank, which it names; MismatchError; TimeoutError."""
        self._ranks.step()
        if not wanted.worst and wanted.routed != BY_RANKS:
            self._last = wanted.kind
            if (made := self._pool.made(wanted.kind)) is not None:
                return self._at_once(wanted, made)
        made = self._agreed(wanted)
        counts = None
        if wanted.routed == BY_RANKS and not wanted.worst:
            counts = aligned_counts(self._ranks, wanted.per_expert, wanted.alignment)
        return self._begun(wanted, made, counts)

    def prepared(self, given: Inputs, alignment: Any, *, apart: bool) -> tuple[Kind, Made, Any, bool] | None:
        """The same of tensors as an expert buffer takes them, in one native call: None, before anything is put into
        the stream, for others. `apart`: it is not the stream of the caller's own work. Gives what `RankCalls.dispatch`
        does, and whether no rank has more to say; where one has, `again` is next."""
        x, topk_idx, topk_weights, per_expert = given.x, given.topk_idx, given.topk_weights, given.per_expert
        host_word = 2 * int(topk_weights is not None)
        for kind, made in self._pool.of_rank_layout():
            if made.calls is None:
                continue
            try:
                begun = made.calls.dispatch(x, topk_idx, topk_weights, None, per_expert, 0, alignment, host_word, apart)
            except BaseException:  # the other ranks are at a call, and so is this one
                self._ranks.step()
                raise
            if begun is not None:
                self._ranks.step()
                self._last = kind
                told: Any = begun[6]
                return kind, made, begun, all(word == host_word for word in told[1])
        return None

    def _begun(self, wanted: Wanted, made: Made, counts: list[int] | None = None) -> Started:
        """When all have agreed."""
        rows, worst = wanted.rows, wanted.worst or None
        result = made.buffer.dispatch(*rows, "rank", expert_alignment=wanted.alignment, max_rows=worst)
        return Started(made, result, counts or result.count_list or [])

    def _agreed(self, wanted: Wanted) -> Made:
        """The expert buffer for a dispatch that begins when all ranks have said what they want: the first of its kind;
        one without ids. Those with `worst` agree once, as the host is not to wait for anybody."""
        kind, worst, tokens = wanted.kind, wanted.worst, wanted.tokens
        made = self._pool.made(kind)
        if made is not None and (kind, worst) in self._settled:
            if tokens > made.max_tokens:
                detail = f"x has {tokens} tokens, and with num_worst_tokens {worst} there is room for {made.max_tokens}"
                raise wrong("dispatch", detail, "there is for num_worst_tokens / ranks, and for the first call's")
            return made
        call = Call.of(kind, wanted.routed, worst, max(tokens, -(-worst // self._ranks.size)))
        most = self._heard(call, None)
        if worst:
            self._settled.add((kind, worst))
        return self._pool.rank_layout(kind, most, wanted.num_sms)

    def _at_once(self, wanted: Wanted, made: Made) -> Started:
        """A dispatch that begins before the ranks have said what they want.

        A rank with more tokens than there is room for begins without any, so that the others' end well, and has them
        listen; then all dispatch again, with more room.
        """
        kind, alignment, fits = wanted.kind, wanted.alignment, wanted.tokens <= made.max_tokens
        rows = wanted.rows if fits else no_rows(kind, self._machine.device)
        host_word = 2 * wanted.routed + (0 if fits else LISTEN)
        result = self._machine.dispatch(made, rows, alignment, host_word, counted=True)
        if all(word == host_word for word in result.host_words) and fits:
            return Started(made, result, result.count_list)
        said = result.host_words
        del result
        return self.again(wanted, said)

    def again(self, wanted: Wanted, said: list[int]) -> Started:
        """The dispatch once more, when all ranks have said what they want. `said`: by their hosts, in the first one,
        whose result nobody holds any more."""
        kind = wanted.kind
        lost = [rank for rank, word in enumerate(said) if word == NO_REPORT]
        most = self._heard(Call.of(kind, wanted.routed, 0, wanted.tokens, int(bool(lost))), kind)
        if lost:
            detail = f"rank {lost[0]} did not come in time"
            hint = "the next dispatch makes another expert buffer, and is as good as ever when all ranks come to it"
            raise TimeoutError(f"dispatch: {detail}; {hint}", operation="dispatch", detail=detail, hint=hint)
        return self._begun(wanted, self._pool.rank_layout(kind, most, wanted.num_sms))

    def _heard(self, call: Call, begun: Kind | None) -> int:
        """The most tokens that any rank wants room for, when all have said so. `begun`: what this one has begun."""
        said = call.told(self._ranks)
        try:
            return call.agreed(said)
        finally:
            self._keep_step(said, begun)

    def refuse(self, worst: Any, why: str) -> None:
        """A call that is wrong here: the others hear why, unless it is one that they have agreed about."""
        self._ranks.step()
        if any(worst == one for _, one in self._settled):
            return
        call, begun = Call(), None
        agrees_first = isinstance(worst, int) and worst > 0
        if not agrees_first and self._last is not None and self._pool.made(self._last) is not None:
            self._take_part(self._last)  # most likely what the others have begun
            call, begun = Call.of(self._last), self._last
        with contextlib.suppress(CrossrailError):  # there is one already
            self._keep_step(call.told(self._ranks, why), begun)

    def _keep_step(self, said: list[Said], begun: Kind | None) -> None:
        """Each rank has begun the same, or takes part now, so that all ends well and nobody is masked; expert buffers
        to whose operation a rank did not come are made anew when they are next needed."""
        kinds = {kind for there in said if (kind := there.call.begins_with) is not None and self._pool.made(kind)}
        if len(kinds) > 1 or any(there.call.late for there in said):
            for kind in kinds:
                self._pool.forget(kind)
        elif kinds - {begun}:
            self._take_part(*kinds)

    def _take_part(self, kind: Kind) -> None:
        """In a dispatch of the others, without tokens, and with something to say."""
        if (made := self._pool.made(kind)) is not None:
            with contextlib.suppress(CrossrailError):
                self._machine.dispatch(made, no_rows(kind, self._machine.device), 1, LISTEN, counted=False)
