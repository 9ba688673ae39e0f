"""Tool results are put behind their calls, in the order of the calls, whatever order they come in."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.requests.tool_results import in_call_order, permuted

ASK = {"role": "user", "content": "Fetch both."}


def calls(*ids: str | None, names: str = "") -> Any:
    """Returns a message with a call for every id; None is a call without an id."""
    made = [
        {"type": "function", "function": {"name": names[place] if names else "f", "arguments": "{}"}}
        | ({} if id is None else {"id": id})
        for place, id in enumerate(ids)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(id: str | None, said: str, name: str = "") -> Any:
    return (
        {"role": "tool", "content": said}
        | ({} if id is None else {"tool_call_id": id})
        | ({"name": name} if name else {})
    )


def said(messages: list[Any]) -> list[str]:
    """Returns the results' texts, or the roles of other messages."""
    return [str(each["content"] if each["role"] == "tool" else each["role"]) for each in in_call_order(messages)]


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([calls("1", "2"), result("1", "a"), result("2", "b")], ["assistant", "a", "b"]),
        ([calls("1", "2"), result("2", "b"), result("1", "a")], ["assistant", "a", "b"]),
        ([calls("1", "2", "3"), result("3", "c"), result("1", "a")], ["assistant", "a", "c"]),
        # Without ids the order decides, or the names if there are any.
        ([calls(None, None), result(None, "a"), result(None, "b")], ["assistant", "a", "b"]),
        ([calls(None, None, names="fg"), result(None, "b", "g"), result(None, "a", "f")], ["assistant", "a", "b"]),
        ([calls("1", "2", names="fg"), result(None, "b", "g"), result("1", "a")], ["assistant", "a", "b"]),
        # An id that no call has was changed by someone: the result belongs to the remaining call.
        ([calls("1", "2"), result("x", "b"), result("1", "a")], ["assistant", "a", "b"]),
        ([calls("1"), result("1", "a"), result("x", "?")], ["assistant", "a", "?"]),
        # The same id twice: both results stay together.
        ([calls("1", "2"), result("2", "b"), result("1", "a"), result("1", "A")], ["assistant", "a", "A", "b"]),
        # Other messages between.
        ([calls("1", "2"), result("2", "b"), ASK, result("1", "a")], ["assistant", "a", "b", "user"]),
        ([result("1", "a"), ASK, calls("1")], ["user", "assistant", "a"]),
        # A result without a call.
        ([ASK, result("1", "a"), calls("2"), result("2", "b")], ["user", "a", "assistant", "b"]),
    ],
)
def test_results_are_behind_their_calls(messages: list[Any], wanted: list[str]):
    assert said(messages) == wanted
    assert in_call_order(in_call_order(messages)) == in_call_order(messages)


def test_ids_that_come_again_in_each_turn_are_those_of_their_turn():
    turn = [calls("call_0", "call_1"), result("call_1", "b"), result("call_0", "a")]
    again = [calls("call_0", "call_1"), result("call_1", "d"), result("call_0", "c")]
    assert said([ASK, *turn, ASK, *again]) == ["user", "assistant", "a", "b", "user", "assistant", "c", "d"]


def test_results_get_what_they_lack_of_their_calls():
    one, other = map(dict, in_call_order([calls("1", "2", names="fg"), result(None, "b", "g"), result("1", "a")])[1:])
    assert (one["name"], one["tool_call_id"]) == ("f", "1")
    assert (other["name"], other["tool_call_id"]) == ("g", "2")


def test_messages_without_results_stay_the_same():
    messages: Any = [ASK, calls("1"), ASK]
    assert in_call_order(messages) == messages


def test_what_belongs_to_messages_moves_with_them():
    assert permuted([0, 2, 1], [1, 2, 0], ["a", "b", "c"]) == ["a", "b", "c"]
    assert permuted([2, 1, 0], [1, 2, 1], ["a", "b", "c", "d"]) == ["d", "b", "c", "a"]
