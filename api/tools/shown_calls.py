"""A chat template's text for known calls: the example by which a model's call format is recognised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...cluster.errors import InvalidRequest
from .formats.call_format import ARGUMENTS, NAMES, CallMarks, common_length
from .formats.keyed_calls import PYTHONIC, KeyedCalls
from .model_text import ChatTemplate, Render

# Mistral's templates accept only ids of nine letters and digits. Kimi's ids have the name in them.
IDS = (("firstId01", "secondI02"), ("functions.first_known:0", "functions.second_known:1"))

_ASKED = {"role": "user", "content": "?"}
_SAID = "Something said."


def conversation_with_calls(render: Render, ids: Sequence[str]) -> str:
    """Returns a rendered conversation that ends with the known calls, one for each id.

    Raises:
        InvalidRequest: the template refuses it.
    """
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in zip(ids, NAMES, ARGUMENTS, strict=False)
    ]
    said = [_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    return render(said, None, {}, generation_prompt=False)


def shown_calls(template: ChatTemplate, end: str, count: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the template's text for one or two calls at the beginning of an answer, with their ids.

    Args:
        end: the model's marker after calls, "" for none.
    """
    for ids in IDS:
        try:
            rendered, prompt = (
                conversation_with_calls(template.render, ids[:count]),
                template.render([_ASKED], None, {}),
            )
        except InvalidRequest:
            continue
        begin = _answer_begin(template, rendered, prompt)
        if begin is not None and NAMES[0] in (written := calls_alone(rendered[begin:], end, template.turn_ends)):
            yield written, ids[:count]


def _answer_begin(template: ChatTemplate, rendered: str, prompt: str) -> int | None:
    """Returns where the assistant's message begins in a conversation; None if it is not found. A prompt may have more
    text there, such as `<think>`."""
    try:
        said = [_ASKED, {"role": "assistant", "content": _SAID}]
        plain = template.render(said, None, {}, generation_prompt=False)
    except InvalidRequest:
        plain = ""
    if (begin := plain.rfind(_SAID)) > 0 and rendered.startswith(plain[:begin]):
        return begin
    if rendered.startswith(prompt):
        return len(prompt)
    shared = common_length(prompt, rendered)
    begin = max(prompt.rfind(end, 0, shared) for end in "\n>") + 1
    return begin if prompt[begin:].strip() and begin > prompt.rfind(_ASKED["content"]) else None


def calls_alone(written: str, end: str, turn_ends: list[str]) -> str:
    """Cuts the text after calls: after their end marker, or at the end of the turn."""
    if end:
        return written[: written.rfind(end) + len(end)]
    ends = [at for each in turn_ends if each and (at := written.find(each)) >= 0]
    return written[: min(ends, default=len(written))].rstrip()


def unshown_format(template: ChatTemplate, marks: CallMarks) -> KeyedCalls | None:
    """Returns the format of a model whose template leaves out the calls of earlier turns, but whose markers show that
    it was trained to write lists of Python calls (LFM2). None for all other models.

    Args:
        marks: mlx-lm's for the model's calls.
    """
    if marks.parser is None or not marks.parser.__module__.endswith(".pythonic"):
        return None
    try:
        if NAMES[0] in conversation_with_calls(template.render, IDS[0]):
            return None
    except InvalidRequest:
        return None
    return replace(PYTHONIC, head=f"{marks.start}{PYTHONIC.head}", tail=f"{PYTHONIC.tail}{marks.end}")
