"""Which of several ranks that fail is told as the reason."""

from __future__ import annotations

import threading
import time

import pytest

from crossrail_tools.cli import ranks
from crossrail_tools.cli.ends import ENDED
from crossrail_tools.cli.failure import Failure
from crossrail_tools.cli.ranks import Ranks


class Rank:
    """What `Ranks` asks of one."""

    def __init__(self, reason: str, ended_at: float | None = None) -> None:
        self.rank = 0
        self._reason = reason
        self.ended_at = float("inf") if ended_at is None else ended_at

    def talks(self) -> bool:
        return self.ended_at == float("inf")

    def failed(self) -> bool:
        return not self.talks()

    def reason(self) -> str:
        return "" if self.talks() else self._reason

    def failure(self, text: str) -> Failure:
        return Failure(text)

    def end(self) -> None:
        self.ended_at = time.monotonic()


def ranks_of(*all_ranks: Rank) -> Ranks:
    """With the end of the first in the inbox."""
    group = Ranks()
    for number, one in enumerate(all_ranks):
        one.rank = number
        group._ranks[number] = one  # type: ignore[assignment]
    ended(group, 0)
    return group


def ended(group: Ranks, rank: int) -> None:
    """Puts the end of ``rank`` into the inbox."""
    group._inbox.put((group._ranks[rank], {"event": ENDED}))


def test_words_of_a_rank_that_was_started_again_are_not_taken_for_its_successors() -> None:
    group = ranks_of(Rank("killed", 1.0))
    group._ranks[0] = Rank("")  # type: ignore[assignment]
    group._inbox.put((group._ranks[0], {"event": "ready"}))
    assert group.wait_for("ready", [0], 1.0) == {0: {"event": "ready"}}


def test_who_is_blamed_is_waited_for_and_is_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    late = Rank("its data did not verify")
    group = ranks_of(Rank("barrier: rank 1 (vm:7) left the group", 1.0), late)

    def end() -> None:
        late.end()
        ended(group, 1)

    timer = threading.Timer(2 * ranks.LAST_WORDS_S, end)
    timer.start()
    with pytest.raises(Failure, match=r"^rank 1: its data did not verify"):
        group.next(1.0)
    timer.join()
    assert "rank 0: barrier: rank 1 (vm:7) left the group" in capsys.readouterr().err


def test_who_is_blamed_and_goes_on_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "BLAMED_S", 0.1)
    group = ranks_of(Rank("dispatch: nothing came from rank 1", 1.0), Rank(""))
    with pytest.raises(Failure, match=r"^rank 0: dispatch"):
        group.next(1.0)


def test_of_two_that_blame_each_other_the_first_to_end_is_the_reason() -> None:
    group = ranks_of(Rank("rank 1 is gone", 2.0), Rank("rank 0 is late", 1.0))
    ended(group, 1)
    with pytest.raises(Failure, match=r"^rank 1: rank 0 is late"):
        group.next(1.0)
