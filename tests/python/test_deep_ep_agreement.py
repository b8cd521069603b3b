"""How ranks of crossrail.deep_ep keep step in normal dispatches: one rank, to which the others are a script."""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest

from crossrail import MismatchError, TimeoutError, UsageError
from crossrail._experts_device import NO_REPORT
from crossrail.deep_ep import agreement
from crossrail.deep_ep.agreement import BY_RANKS, LISTEN, Call, Dispatches, DispatchRequest
from crossrail.deep_ep.pool import Kind, Pool

KIND = Kind("rank", 512, 8, 2, "bf16")
OTHER = KIND._replace(payload="f32")
NONE = ("no rows", [], None)
WEIGHTED = 2
"""What a rank says that has weights and nothing to add."""


class Others:
    """Rank 1 of two. `calls`: what it says at each exchange to come, and why it cannot; `words`: what the kernels tell
    of it at each dispatch to come."""

    rank, size, device = 0, 2, None
    streams: Any = SimpleNamespace(is_capturing=lambda: False)

    def __init__(self) -> None:
        self.calls: list[tuple[Call, str]] = []
        self.words: list[int] = []
        self.heard: list[tuple[Call, str]] = []
        self.did: list[str] = []

    def next_call(self) -> None:
        self.did.append("next_call")

    def close(self) -> None: ...

    def exchange(self, message: bytes) -> list[bytes]:
        *numbers, length, text = Call._FORM.unpack(message)
        self.heard.append((Call(*numbers), text[:length].decode()))
        said = self.calls.pop(0)
        if said is SAME:
            return [message, message]
        call, why = said
        return [message, Call._FORM.pack(*astuple(call), len(why), why.encode())]

    def make(self, kind: Kind, most: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        self.did.append(f"made {kind.payload} for {most}")

        def dispatch(rows: Any, idx: Any, weights: Any, layout: str, expert_alignment: int, max_rows: Any) -> Any:
            assert layout == "rank"
            self.did.append(f"{len(idx)} tokens when all agreed" + (f", {max_rows} rows" if max_rows else ""))
            return SimpleNamespace(count_list=None if max_rows else [4])

        return SimpleNamespace(dispatch=dispatch, kind=kind)

    def prepared_calls(self, buffer: Any, kind: Kind) -> Any:
        return None

    def bytes(self, kind: Kind, most: int) -> int:
        return most

    def dispatch(self, made: Any, given: Any, alignment: int, host_word: int, *, counted: bool) -> Any:
        self.did.append(f"{len(given[1])} tokens in {made.buffer.kind.payload}, says {host_word}")
        return SimpleNamespace(count_list=[3], host_words=[host_word, self.words.pop(0)] if counted else None)


SAME = (Call(), "")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    monkeypatch.setattr(agreement, "no_rows", lambda kind, device: NONE)
    return Others()


@pytest.fixture
def mine(others: Others) -> Dispatches:
    """A rank that has dispatched once."""
    made = Dispatches(others, others, Pool(others, 2, 0))
    others.calls = [SAME]
    made.dispatch(wanted())
    assert others.did == ["next_call", "made bf16 for 128", "5 tokens when all agreed"]
    others.did.clear()
    others.heard.clear()
    return made


def wanted(tokens: int = 5, kind: Kind = KIND, routed: int = 1, worst: int = 0) -> DispatchRequest:
    return DispatchRequest(
        kind, routed, worst, ("rows", [0] * tokens, "weights"), SimpleNamespace(tolist=lambda: [1] * 8), 1, 20
    )


def test_usually_nobody_talks(others: Others, mine: Dispatches) -> None:
    for _ in range(3):
        others.words = [WEIGHTED]
        assert mine.dispatch(wanted()).counts == [3]
    assert others.did == ["next_call", "5 tokens in bf16, says 2"] * 3
    assert not others.heard


def test_room_is_made_for_more_tokens_here(others: Others, mine: Dispatches) -> None:
    others.words, others.calls = [WEIGHTED], [(Call.of(KIND, 1, 0, 7), "")]
    assert mine.dispatch(wanted(300)).made.max_tokens == 384
    assert others.did == ["next_call", "0 tokens in bf16, says 3", "made bf16 for 384", "300 tokens when all agreed"]
    assert others.heard == [(Call.of(KIND, 1, 0, 300), "")]


def test_room_is_made_for_more_tokens_elsewhere(others: Others, mine: Dispatches) -> None:
    others.words, others.calls = [WEIGHTED + LISTEN], [(Call.of(KIND, 1, 0, 1000), "")]
    assert mine.dispatch(wanted()).made.max_tokens >= 1000
    assert others.did[1] == "5 tokens in bf16, says 2" and others.did[-1] == "5 tokens when all agreed"


def test_one_without_weights(others: Others, mine: Dispatches) -> None:
    others.words, others.calls = [0], [(Call.of(KIND, 0, 0, 5), "")]
    with pytest.raises(MismatchError, match=r"the form of the routing .* is 1 here and 0 on rank 1"):
        mine.dispatch(wanted())
    assert others.did == ["next_call", "5 tokens in bf16, says 2"], "all have begun the same"


def test_a_call_that_is_wrong_elsewhere(others: Others, mine: Dispatches) -> None:
    others.words, others.calls = [LISTEN], [(Call.of(KIND), "x is a banana")]
    with pytest.raises(UsageError, match="rank 1 could not: x is a banana"):
        mine.dispatch(wanted())
    assert others.did == ["next_call", "5 tokens in bf16, says 2"]


def test_a_call_that_is_wrong_here(others: Others, mine: Dispatches) -> None:
    others.calls = [(Call.of(KIND, 1, 0, 5), "")]
    mine.refuse(0, "x is a banana")
    assert others.did == ["next_call", "0 tokens in bf16, says 1"], "what the others have begun, most likely"
    assert others.heard == [(Call.of(KIND), "x is a banana")]


def test_a_call_that_is_wrong_where_others_agree_first(others: Others, mine: Dispatches) -> None:
    others.calls = [(Call.of(KIND, BY_RANKS, 0, 5), "")]
    mine.refuse(16, "x is a banana")
    assert others.did == ["next_call"] and others.heard == [(Call(), "x is a banana")]
    others.did.clear()
    others.calls = [(Call.of(KIND), "x is a banana")]  # it thought that this rank had begun
    with pytest.raises(UsageError, match="rank 1 could not"):
        mine.dispatch(wanted(routed=BY_RANKS))
    assert others.did == ["next_call", "0 tokens in bf16, says 1"], "takes part in what the other has begun"


def test_a_rank_that_has_begun_something_else(others: Others, mine: Dispatches) -> None:
    others.calls = [SAME]
    mine.dispatch(wanted(kind=OTHER))
    others.did.clear()
    others.words, others.calls = [NO_REPORT], [(Call.of(OTHER, 1, 0, 5, late=1), "")]
    with pytest.raises(MismatchError, match="the kind of x"):
        mine.dispatch(wanted())
    assert others.heard[-1] == (Call.of(KIND, 1, 0, 5, late=1), "")
    for kind in (KIND, OTHER):
        others.did.clear()
        others.calls = [SAME]
        mine.dispatch(wanted(kind=kind))
        assert others.did[1].startswith(f"made {kind.payload}"), "nobody knows who is masked in the former one"


def test_a_rank_that_is_late(others: Others, mine: Dispatches) -> None:
    others.words, others.calls = [NO_REPORT], [(Call.of(KIND, 1, 0, 5), "")]
    with pytest.raises(TimeoutError, match="rank 1 timed out"):
        mine.dispatch(wanted())
    others.did.clear()
    others.calls = [SAME]
    mine.dispatch(wanted())
    assert others.did[1] == "made bf16 for 128"


def test_the_worst_case_is_agreed_about_once(others: Others, mine: Dispatches) -> None:
    others.calls = [SAME]
    for _ in range(3):
        assert mine.dispatch(wanted(worst=600)).counts == []
    assert others.did[0] == "next_call" and others.did[1].startswith("made bf16 for 3")
    assert others.did[2:] == [
        "5 tokens when all agreed, 600 rows",
        *["next_call", "5 tokens when all agreed, 600 rows"] * 2,
    ]
    assert len(others.heard) == 1
    with pytest.raises(UsageError, match=r"x has 900 tokens, and with num_worst_tokens 600 there is room for 3\d\d"):
        mine.dispatch(wanted(900, worst=600))
    mine.refuse(600, "nobody listens")
    assert len(others.heard) == 1
