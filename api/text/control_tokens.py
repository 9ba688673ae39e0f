"""A tokenizer's control tokens, and how a text can contain a control token's text without becoming the token.

A control token is an added token that is structure: of roles, pictures, tool calls, reasoning. Its text is called a
mark or marker. Tokenizers turn every marker in a text into the token, so a caller's text with `<|im_end|>` would end
its message. Therefore each marker that a caller wrote is broken before the template renders it: `BREAK`, a lone
surrogate, which no valid text has, is put behind its first character. Templates pass it on like a letter, their
searches for a marker do not find a broken one, and the encoder finds no control token across it (`guarded_encoding`). A
text with breaks is called guarded.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from cachetools import LRUCache

from ...cluster.errors import InvalidRequest

BREAK = "\udbff"
"""The break: it stands for no character, and no control token extends across it."""

ESCAPED_BREAK = "\\udbff"
"""The break as an ASCII JSON escape."""

_END = "\0"
"""A separator behind each of several texts."""

_SPACES = " \t\r\n\u2581"
_BRACKETED = re.compile(r"[<\[({◁【［＜].+[>\])}▷】］＞]", re.DOTALL)

# Some tokenizers have an added token for each of these, but it is ordinary text.
_HTML = re.compile(
    r"</?(?:a|b|blockquote|body|br|caption|center|code|dd|div|dl|dt|em|font|footer|form|h[1-6]|head|header|hr|html|i"
    r"|iframe|img|input|label|li|main|nav|ol|option|p|pre|s|section|select|small|span|strong|sub|sup|table|tbody|td"
    r"|tfoot|th|thead|tr|u|ul)>"
)

# Words with which users switch reasoning on or off; templates search their texts for them.
_SWITCH = re.compile(r"/[a-z_]+")


_ANSWERS_MAX = 4096
_PLACES_EACH = 64
"""The number of markers for which an ordinary answer has room."""


def unbroken(text: str) -> str:
    """Returns a guarded text without its breaks."""
    return text.replace(BREAK, "")


def breaks_of(text: str) -> list[int]:
    """Returns the indexes, in the text without breaks, of the characters before which a guarded text has breaks, in
    order."""
    places: list[int] = []
    at = 0
    for piece in text.split(BREAK)[:-1]:
        at += len(piece)
        places.append(at)
    return places


def with_breaks(text: str, places: Sequence[int]) -> str:
    """Returns `text` with breaks before the characters at `places`, which are in order."""
    edges = [0, *places, len(text)]
    return BREAK.join(text[start:end] for start, end in pairwise(edges))


def refuse_breaks(text: str) -> str:
    """Returns a text that a caller wrote.

    Raises:
        InvalidRequest: it has the surrogate that is used as a break, so it is not valid Unicode.
    """
    if BREAK in text:
        raise InvalidRequest(f"text with an unpaired surrogate at character {text.index(BREAK)}")
    return text


@dataclass(frozen=True)
class Markers:
    """The texts around a model's reasoning, and around its tool calls; "" for those that it does not have.

    Attributes:
        calls: the markers that its template writes around calls.
        pictures: the placeholders of a picture or video.
    """

    think_start: str = ""
    think_end: str = ""
    call_start: str = ""
    call_end: str = ""
    calls: str = ""
    pictures: tuple[str, ...] = ()


class GivenAnswers:
    """A model's recent answers whose content has the text of control tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Few answers have this many markers, and a long answer takes the room of several.
        self._breaks: LRUCache[bytes, list[int]] = LRUCache(
            _ANSWERS_MAX * _PLACES_EACH, getsizeof=lambda places: max(len(places), _PLACES_EACH)
        )

    def learn(self, scope: str, said: str) -> None:
        """Remembers an answer's content for the callers of `scope`. It has breaks in the markers that are text."""
        said = said.strip()
        # An answer that is larger than the whole cache is not kept.
        with self._lock, suppress(ValueError):
            self._breaks[_digest(scope, unbroken(said))] = breaks_of(said)

    def guarded(self, scope: str, text: str) -> str | None:
        """Returns an assistant's text with breaks in the markers that are text, None if the answer is not known."""
        stripped = text.strip()
        with self._lock:
            breaks = self._breaks.get(_digest(scope, stripped))
        if breaks is None:
            return None
        begin = text.find(stripped)
        return with_breaks(text, [begin + place for place in breaks])


def _digest(scope: str, text: str) -> bytes:
    return hashlib.sha256(f"{scope}\0{text}".encode("utf-8", "surrogatepass")).digest()


class ControlTokens:
    """The control tokens of one model. Thread-safe.

    Args:
        added: each added token's `AddedToken`, by its id.
        special: the tokens that are always control tokens.
        own: the tokens with which the model marks calls and reasoning.
        template: the chat template, "" if it is not known.
        normalizer: the tokenizer's normalization of a text, None for none.

    Attributes:
        ids: the control tokens.
        marks: the texts that are broken in a caller's text: those of the control tokens, and markers of pictures and
            reasoning that are not tokens.
        own_marks: in UTF-8, the texts of the tokens with which a model marks calls and reasoning in its own answers.
        given: recent answers with the text of control tokens.
    """

    def __init__(
        self,
        added: Mapping[int, Any],
        special: frozenset[int],
        own: frozenset[int],
        markers: Markers,
        template: str,
        normalizer: Any | None,
    ) -> None:
        self.given = GivenAnswers()
        marked = {markers.call_start, markers.call_end, markers.think_start, markers.think_end}
        contents = {token: entry.content for token, entry in added.items()}
        ids = {
            token
            for token, content in contents.items()
            if _is_control(content, token in special or content in marked, template)
        }
        if ids:
            # A longer one that contains a control token's text is not ordinary text either.
            any_mark = re.compile(_any_of(contents[token] for token in ids))
            ids |= {token for token, content in contents.items() if any_mark.search(content)}
        self.ids = frozenset(ids)
        texts = {contents[token] for token in ids}
        self._token_marks = frozenset(texts)
        self.own_marks = frozenset(contents[token].encode() for token in own & self.ids)
        texts |= {mark.strip() for mark in markers.pictures}
        texts |= {mark for mark in (markers.think_start, markers.think_end) if not mark.strip().isalnum()}
        self.marks = frozenset(mark for mark in texts if len(mark) > 1)
        self._added, self._normalizer, self._template = added, normalizer, template
        # Finds a marker, or the beginning of one at the end of a text.
        self._suspect = re.compile(_any_of(self.marks, rf"\s*{_END}")) if self.marks else None
        self._first = re.compile(rf"(?=(?:{_any_of(self.marks)}))(.)", re.DOTALL) if self.marks else None
        self._begun = frozenset(mark[:size] for mark in self.marks for size in range(1, len(mark)))
        self._begin_with = frozenset(mark[0] for mark in self.marks)
        self._longest = max(map(len, self.marks), default=0)

    @cached_property
    def _token_marks_in_bytes(self) -> re.Pattern[bytes] | None:
        marks = [mark for mark in self._token_marks if len(mark) > 1]
        return re.compile(_any_of(marks).encode()) if marks else None

    @cached_property
    def _continued(self) -> re.Pattern[str] | None:
        """Finds texts that begin with the rest of a marker whose beginning the template writes before them; None for
        most templates."""
        rests: set[str] = set()
        for written in _constants(self._template):
            for size in range(1, min(self._longest, len(written) + 1)):
                if (begun := written[-size:]) in self._begun:
                    # A marker that is the beginning of another one is complete, so no rest needs to follow.
                    rests |= {mark[size:] for mark in self.marks if mark.startswith(begun) and mark != begun}
        # Templates may strip a text.
        cut = rf"\s*{_END}"
        return re.compile(rf"{_END}\s*(?:{_any_of(rests, cut)})") if rests else None

    @cached_property
    def _rewriting(self) -> list[Callable[[str], str]]:
        """The changes that the template makes to texts and that may turn other text into a marker."""
        return list(_rewriting(self._template))

    @cached_property
    def _folded(self) -> re.Pattern[str] | None:
        """Finds markers, or the beginning of one at the end, in normalized texts, if the tokenizer searches normalized
        texts for them, so that they may be spelled differently; None for most tokenizers."""
        normalizer = self._normalizer
        if normalizer is None:
            return None
        entries = [self._added[token] for token in self.ids]
        marks = {normalizer.normalize_str(entry.content).strip(_SPACES) for entry in entries if entry.normalized}
        return re.compile(_any_of(marks - {""}, rf"[\s{_SPACES[-1]}]*{_END}")) if marks - {""} else None

    def guarded(self, text: str) -> str:
        """Returns a caller's text with its markers broken, including one that only begins at its end, because text may
        follow.

        Raises:
            InvalidRequest: it has an unpaired surrogate.
        """
        if not text or not self._is_suspect([text]):
            return text
        if self._spells_folded(text):
            return _all_broken(text)
        places = self._begun_at_end(text)
        if self._first is not None:
            places |= {match.end() for match in self._first.finditer(text)}
        if self._continues(text):
            places.add(len(text) - len(text.lstrip()))
        shown = with_breaks(text, sorted(places)) if places else text
        return _all_broken(text) if self._is_rewritten(f"{_END}{shown}{_END}") else shown

    def _is_suspect(self, texts: list[str]) -> bool:
        """Returns whether one of the texts may have a marker, or a part of one at its beginning or end. Many short
        texts take no longer than a long one.

        Raises:
            InvalidRequest: one has an unpaired surrogate.
        """
        joined = _END.join(["", *texts, ""])
        if BREAK in joined:
            for text in texts:
                refuse_breaks(text)
        if self._may_spell(joined) or self._is_rewritten(joined):
            return True
        return self._folded is not None and any(map(self._spells_folded, texts))

    def _may_spell(self, joined: str) -> bool:
        return any(pattern is not None and pattern.search(joined) for pattern in (self._suspect, self._continued))

    def _is_rewritten(self, joined: str) -> bool:
        """Returns whether the template may turn something in the texts into a marker."""
        return any(self._may_spell(rewritten(joined)) for rewritten in self._rewriting)

    def _begun_at_end(self, text: str) -> set[int]:
        """Returns the indexes for breaks in markers that only begin at the end of the text: behind the first character
        of each."""
        found: set[int] = set()
        # Templates may strip a text.
        stripped = text.rstrip()
        for shown in {text, stripped}:
            tail = shown[1 - self._longest :] if self._longest > 1 else ""
            for first in self._begin_with:
                at = tail.find(first)
                while at >= 0:
                    if tail[at:] in self._begun:
                        found.add(len(shown) - len(tail) + at + 1)
                    at = tail.find(first, at + 1)
        return found

    def _spells_folded(self, text: str) -> bool:
        """Returns whether the tokenizer finds a marker in the normalized text, or may find one that begins at its end
        or ends at its beginning."""
        if self._folded is None or self._normalizer is None:
            return False
        try:
            shown = self._normalizer.normalize_str(text)
        except UnicodeEncodeError:
            # Not valid Unicode; encoding refuses it.
            return False
        return self._folded.search(f"{shown}{_END}") is not None or self._continues(shown.lstrip(_SPACES[-1]))

    def _continues(self, text: str) -> bool:
        """Returns whether a text continues a marker that the template begins."""
        if self._continued is None:
            return False
        size = len(text) - len(text.lstrip()) + self._longest
        return self._continued.match(f"{_END}{text[:size]}{_END}") is not None

    def guarded_value(self, value: Any) -> Any:
        """Returns a JSON value with the markers in all its texts and keys broken; the value itself if there are none.

        Raises:
            InvalidRequest: a text has an unpaired surrogate, or the value is nested too deeply.
        """
        texts: list[str] = []
        try:
            _gather(value, texts)
            return self._guarded_value(value) if self._is_suspect(texts) else value
        except RecursionError:
            raise InvalidRequest("a value in the request is nested too deeply") from None

    def _guarded_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.guarded(value)
        if isinstance(value, list):
            return [self._guarded_value(each) for each in value]
        if isinstance(value, dict):
            return {self._guarded_value(key): self._guarded_value(each) for key, each in value.items()}
        return value

    def spelled(self, data: bytes, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yields the first byte and the end (exclusive) of each place from byte `start` on where `data`, text in UTF-8,
        has a control token's text, whatever its tokens are."""
        if (pattern := self._token_marks_in_bytes) is not None:
            for match in pattern.finditer(data, start):
                yield match.span()


def _is_control(content: str, special: bool, template: str) -> bool:
    if len(content) < 2 or not content.strip(_SPACES):
        return False
    if special:
        return True
    if _HTML.fullmatch(content) or _SWITCH.fullmatch(content):
        return False
    return _BRACKETED.fullmatch(content) is not None or (content in template and not content.isalnum())


def _gather(value: Any, texts: list[str]) -> None:
    """Appends the texts and keys in a JSON value to `texts`."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, each in value.items():
            texts.append(key)
            _gather(each, texts)
    elif isinstance(value, list):
        for each in value:
            _gather(each, texts)


def _any_of(words: Iterable[str], cut: str = "") -> str:
    """Returns a pattern that matches the longest of the words at a place. It is a tree of their characters, so that
    thousands of words take no longer than a few.

    Args:
        cut: a pattern for what may follow the beginning of a word instead of its rest; "" for nothing.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return "|".join(re.escape(character) + _pattern(rest, cut) for character, rest in sorted(tree.items()))


def _pattern(node: dict[str, Any], cut: str) -> str:
    """Returns the pattern for the characters that may follow a node of that tree."""
    branches = [re.escape(character) + _pattern(rest, cut) for character, rest in sorted(node.items()) if character]
    if not branches:
        return ""
    if "" not in node and cut:
        branches.append(cut)
    if len(branches) == 1 and "" not in node:
        return branches[0]
    joined = "(?:" + "|".join(branches) + ")"
    return f"{joined}?" if "" in node else joined


def _all_broken(text: str) -> str:
    """Returns a text with breaks around all its characters, except the white space around the text, which templates may
    strip."""
    core = text.strip()
    return text.replace(core, f"{BREAK}{BREAK.join(core)}{BREAK}", 1) if core else text


def _lexed(template: str) -> list[tuple[str, str]]:
    """Returns the kinds and texts of a chat template's tokens, without white space; none if it is not a template."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        return [(kind, value) for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError:
        return []


def _constants(template: str) -> Iterator[str]:
    """Yields the texts that a chat template itself writes."""
    for kind, value in _lexed(template):
        if kind == "data":
            yield value
        elif kind == "string":
            yield _literal(value)


def _rewriting(template: str) -> Iterator[Callable[[str], str]]:
    """Yields the changes that a chat template makes to texts with filters and methods that change letters."""
    tokens = _lexed(template)
    names = {value for kind, value in tokens if kind == "name"}
    for name in sorted(names & {"lower", "upper", "capitalize", "title"}):
        yield getattr(str, name)
    pairs: set[tuple[str, str]] = set()
    for at, token in enumerate(tokens):
        kinds, values = zip(*tokens[at : at + 5], strict=True)
        if token == ("name", "replace") and kinds[1:] == ("operator", "string", "operator", "string"):
            pairs.add((_literal(values[2]), _literal(values[4])))
    for old, new in sorted(pairs):
        if old:
            yield partial(_replaced, old=old, new=new)


def _replaced(text: str, *, old: str, new: str) -> str:
    return text.replace(old, new)


def _literal(written: str) -> str:
    """Returns the text of a string literal in a template."""
    return written[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
