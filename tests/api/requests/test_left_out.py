"""The names of what a model does not get, and the header that has them."""

from __future__ import annotations

import pytest

from satchel.api.requests.left_out import LeftOut, newest_said


def test_each_name_is_said_once_and_in_order():
    left_out = LeftOut(["web_search", "mcp"])
    left_out.add("image", "web_search")
    left_out.add("image")
    assert left_out.names == ["web_search", "mcp", "image"] and left_out.header == "web_search, mcp, image"
    assert LeftOut().header == ""


def test_names_of_any_kind_and_number_are_one_line_of_ascii():
    left_out = LeftOut(f"kind{number}" for number in range(1000))
    left_out.add("a\r\nb: ü,")
    assert len(left_out.header) < 2**11 and left_out.header.isprintable() and left_out.header.endswith("more")
    assert LeftOut(["a\r\nb: ü,"]).header == "a??b:???"


@pytest.mark.parametrize(
    ("roles", "newest"),
    [
        (["user"], 0),
        (["user", "assistant", "user"], 2),
        (["user", "user", "system"], 1),
        (["user", None], 0),
        (["user", "assistant"], 1),
        (["user", "assistant", "tool"], -1),
        (["user", "assistant", "tool", "user"], 3),
        (["system"], -1),
        ([], -1),
    ],
)
def test_only_what_is_answered_or_continued_is_new(roles: list[str | None], newest: int):
    assert newest_said(roles) == newest
