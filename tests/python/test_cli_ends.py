"""Processes that take orders: their answers, and the errors of processes that fail, end or are late."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from crossrail_tools.cli.ends import End
from crossrail_tools.cli.failure import ERROR, EXIT_USAGE, Failure, UsageFailure

PROGRAM = """
import json, os, sys
for line in sys.stdin:
    order = json.loads(line)
    match order.pop("do"):
        case "echo":
            print("not JSON", 7, sep="\\n", flush=True)
            print(json.dumps(order), flush=True)
        case "say":
            print(order["text"], file=sys.stderr, flush=True)
            os._exit(order["code"])
        case "fill":
            sys.stderr.write("x" * 200_000 + "\\n")
            print("{}", flush=True)
        case "end":
            break
"""


@pytest.fixture
def end() -> Iterator[End]:
    one = End("an end", [sys.executable, "-c", PROGRAM])
    yield one
    one.end()


def test_an_order_is_answered(end: End) -> None:
    assert end.do("echo", number=1) == {"number": 1}
    end.order("echo", number=2)
    end.order("echo", number=3)
    assert [end.answer(), end.answer()] == [{"number": 2}, {"number": 3}]


def test_an_answer_may_be_an_error(end: End) -> None:
    with pytest.raises(Failure, match=r"^an end: no such page$"):
        end.do("echo", error="no such page")


def test_an_answer_is_waited_for_within_bounds(end: End) -> None:
    end.pause(True)
    end.order("echo", number=1)
    with pytest.raises(Failure, match=r"^an end: no answer within 0.1 s$"):
        end.answer(0.1)
    end.pause(False)
    assert end.answer() == {"number": 1}


def test_much_talk_does_not_hold_it_up(end: End) -> None:
    assert end.do("fill") == {}


@pytest.mark.parametrize(
    ("text", "code", "kind", "why"),
    [
        ("out of pages", 3, Failure, "its process ended with exit code 3, last line on stderr: out of pages"),
        (f"{ERROR}no rail", 1, Failure, "no rail"),
        (f"{ERROR}no such rail", EXIT_USAGE, UsageFailure, "no such rail"),
    ],
)
def test_one_that_ends_tells_why(end: End, text: str, code: int, kind: type[Failure], why: str) -> None:
    with pytest.raises(Failure, match=rf"^an end: {why}$") as caught:
        end.do("say", text=text, code=code)
    assert type(caught.value) is kind and end.failed()
    end.send({"do": "echo"})  # its stdin is closed
    assert list(end.said) == [text]


def test_one_that_was_killed_says_by_what_and_has_not_failed_if_it_was_meant(end: End) -> None:
    end.process.popen.send_signal(signal.SIGKILL)
    with pytest.raises(Failure, match="killed by SIGKILL"):
        end.answer()
    assert end.failed()
    end.kill()
    assert not end.failed()


def test_it_may_end_by_itself_before_it_is_killed(end: End) -> None:
    end.order("end")
    end.end(grace=30.0)
    assert end.process.popen.poll() == 0 and not end.talks()


def test_what_it_says_may_be_passed_on() -> None:
    heard: list[str] = []
    one = End("an end", [sys.executable, "-c", PROGRAM], hear=heard.append)
    with pytest.raises(Failure, match="exit code 1"):
        one.do("say", text="a note", code=1)
    one.end()
    assert heard == ["a note"] and not one.said


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(Failure, match="an end cannot be started: No such file"):
        End("an end", ["/nonexistent/program"])
