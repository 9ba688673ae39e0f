"""The base of call formats, and the two known calls by which a model's format is recognised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..grammar_rules import ID, TEXT, GrammarRules
from ..readers import Reader
from .harmony_splitter import HarmonySplitter

NAMES = ("first_known", "second_known")
ARGUMENTS = ({"key_one": "value one", "key_two": "value two"}, {"key_three": "value three"})
"""The known calls."""

Parser = Callable[[str, Any], Any]
"""Reads the text of calls between their markers, given the tools, as mlx-lm's parsers do. May raise anything."""


@dataclass(frozen=True)
class CallMarks:
    """How a model's calls are told apart from text.

    Attributes:
        start, end: the markers around calls, "" for none.
        parser: parses the text between the markers; None without one.
    """

    start: str
    end: str
    parser: Parser | None

    @classmethod
    def of(cls, wrapper: Any) -> CallMarks:
        """Returns what mlx-lm knows about the model with this `TokenizerWrapper`."""
        return cls(wrapper.tool_call_start or "", wrapper.tool_call_end or "", wrapper.tool_parser)


@dataclass(frozen=True)
class Parsing:
    """How calls in a model's own format are found in its answers.

    Attributes:
        start, end: the markers around a call; without an `end` the call lasts until the answer ends.
        parser: parses the whole text between the markers; None without one, or if the format has its own stage.
        reader: makes a reader that reads a call while it is written; None if calls are read as a whole.
        bare: the beginning of calls that have no marker; "" if calls have one.
    """

    start: str = ""
    end: str = ""
    parser: Parser | None = None
    reader: Callable[[], Reader] | None = None
    bare: str = ""


@dataclass(frozen=True)
class ConstrainedTool:
    """A tool that may be called. `parameters` is the schema of its arguments; `strict` as in `AnswerForm`."""

    name: str
    parameters: Mapping[str, Any]
    where: str
    strict: bool = False


@dataclass(frozen=True)
class ConstrainedCalls:
    """Which tools an answer may call. If `forced`, it must call at least one; else free text may come before the calls
    or instead of them. With `parallel` there may be several calls. `chosen` says that the caller selected these tools
    among others."""

    tools: Sequence[ConstrainedTool]
    forced: bool
    parallel: bool = True
    chosen: bool = False


class CallFormat(ABC):
    """A way in which models write calls of tools.

    Attributes:
        constrains: whether an answer that may but need not call tools can be constrained to this format.
        quote: the format's own quotation mark, which has no escape; "" for JSON's.
        parses: whether calls are parsed by this format, instead of mlx-lm's parser for the model.
    """

    constrains: ClassVar[bool] = True
    parses: ClassVar[bool] = False
    quote: str = ""

    @classmethod
    @abstractmethod
    def read(cls, written: str, ids: Sequence[str]) -> CallFormat | None:
        """Returns the format if `written` has the known calls, one for each id, in this format; else None."""

    def found_alone(self, written: str, end: str) -> CallMarks | None:
        """Returns how calls of this format are found if mlx-lm has no parser for the model; None if they cannot be told
        apart from text.

        Args:
            written: the known calls in this format.
            end: the model's marker after calls, "" for none.
        """
        return None

    @property
    def parts(self) -> str:
        """The texts around names, keys and values, one per line; "" if not known."""
        return ""

    @abstractmethod
    def constrain(self, rules: GrammarRules, calls: ConstrainedCalls, *, lead: bool, begins: bool) -> str:
        """Adds the rules of calls to a grammar, and returns their symbol.

        Args:
            lead: whether free text may come before the calls, or instead of them.
            begins: if answers are messages, whether the answer begins with the first one.

        Raises:
            InvalidRequest: answers cannot be constrained in this way.
        """

    @abstractmethod
    def parse(self, marks: CallMarks, tools: Sequence[Mapping[str, Any]], *, forced: bool = False) -> Parsing:
        """Returns how calls in this format are found in an answer.

        Args:
            tools: the tools that may be called, as chat templates take them.
            forced: whether the answer must call one.
        """

    def channels(
        self, tools: Sequence[Mapping[str, Any]], *, answering: bool, calls_max: int | None
    ) -> HarmonySplitter | None:
        """Returns a stage that splits an answer into reasoning, content and calls; None if calls are in the content.

        Args:
            tools: the tools that may be called.
            answering: whether the prompt has begun a message to the user.
            calls_max: after this many calls the answer is over; None for no limit.
        """
        return None

    def example(self, name: str, arguments: str) -> str | None:
        """Returns a call with these arguments (JSON); None if the format needs more than that, or does not write
        JSON."""
        return None

    def write(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with their calls in the form that the model's template takes."""
        return [dict(message) for message in messages]


class WrittenFormat(CallFormat):
    """A format made of texts between names and arguments, which are its dataclass's fields.

    Attributes:
        head: the text before the first call's name; it begins with the model's marker.
        between: the text from the end of one call to the next one's name; empty if there is at most one call.
        tail: the text after the last call.
    """

    head: str
    between: str
    tail: str

    @property
    def parts(self) -> str:
        return "\n".join(vars(self).values()).replace(ID, "")

    @abstractmethod
    def _constrain_each(self, rules: GrammarRules, tools: Sequence[ConstrainedTool]) -> list[str]:
        """Adds the rules of each tool's call, from its name on, and returns their symbols."""

    def constrain(self, rules: GrammarRules, calls: ConstrainedCalls, *, lead: bool, begins: bool) -> str:
        each, tail = self._constrain_each(rules, calls.tools), rules.written(self.tail)
        call = rules.rule("call", " | ".join(each))
        between = rules.written(self.between)
        more = f"({between} {call})*" if calls.parallel and between else ""
        if not lead:
            return rules.rule("calls", f"{rules.written(self.head)} {call} {more} {tail}")
        begun = rules.rule("begun", f"{rules.until('lead', self.head)} {call} {more} {tail}")
        return rules.rule("calls", f"{begun} | {rules.rule('said', TEXT)}")


def names_of(tools: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Returns the names of tools, as chat templates take them."""
    return frozenset(tool["function"]["name"] for tool in tools)


def pieces_around(written: str, words: Iterable[str]) -> list[str] | None:
    """Returns the pieces of a text before, between and after `words`; None if the text does not have them in this
    order."""
    pieces: list[str] = []
    for word in words:
        before, found, written = written.partition(word)
        if not found:
            return None
        pieces.append(before)
    return [*pieces, written]


def common_length(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length
