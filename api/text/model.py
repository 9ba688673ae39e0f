"""Between text and token ids: tokenizer and chat template.

Only `load_text_model` does I/O. Rendering and encoding may take milliseconds to seconds and belong in a worker thread.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ...actors.model_files.byte_level import mend_decoder
from ...actors.model_files.end_tokens import read_end_tokens
from ...actors.model_files.foreign_code import own_code_only
from ...actors.model_files.infill import infill_marks
from ...actors.model_files.nulls import without_nulls
from ...actors.model_files.processors import PictureProcessor, in_words, sees
from ...actors.model_files.source import first_sentence
from ...actors.patches import inner_tokenizer, renders_by_code
from ...actors.protocol.media_ids import is_media_token
from ...cluster.errors import InvalidRequest, ModelLoadError
from .answers import harmony
from .answers.call_format import SHOWN_BY_NAME, KeyedFormat, rendered_calls, unshown_format, with_calls
from .answers.detokenizing import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .answers.template_calls import KeyedCalls, TemplateCalls, find_calls
from .callers_text import GivenAnswers
from .control_tokens import BREAK, ESCAPED_BREAK, ControlTokens, unbroken
from .guarded_encoding import GuardedEncoder
from .recent import RecentTexts
from .script import Script
from .spelling import Spelling
from .template_dates import dated, shows_date
from .template_habits import TemplateHabits, habits_of
from .template_tools import TemplateTools, tools_of
from .thinking_variables import with_thinking

logger = logging.getLogger(__name__)

_LONG_TOKEN_CHARACTERS = 8
"""Texts with more characters per token than this are rare."""
_COUNTED_CHARACTERS = 2**16

_HABITS_MAX = 64
"""Sets of variables for which a template's habits are remembered."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _bytes_by_character() -> dict[str, int]:
    """Returns GPT-2's reversible map of bytes to printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TextModel:
    """The text side of one served model: tokenizer, chat template, and its formats of tool calls and reasoning.

    Thread-safe.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
        sampling: the model's own sampling defaults by field.
        pictures: the model's image processor, None if it takes no images.
        script: what the model says instead of what it would, None for nothing.

    Attributes:
        hidden_tokens: special and end-of-sequence tokens, which never become text.
        tool_call_tokens, think_tokens: markers of tool calls and reasoning, hidden or not.
        infill_marks: the tokens of prompts for what comes between two texts; None if there are none.
        byte_level: whether a token's bytes do not depend on its neighbours.
        backend: the `tokenizers.Tokenizer`; None if the tokenizer is written in Python.
        added_tokens: the `AddedToken` of each added token's id.
    """

    def __init__(
        self,
        wrapper: Any,
        *,
        name: str = "",
        sampling: Mapping[str, float] | None = None,
        pictures: PictureProcessor | None = None,
        script: Script | None = None,
    ) -> None:
        self.name = name
        self.script = script
        self.sampling = dict(sampling or {})
        self.pictures = pictures
        self._wrapper = wrapper
        self._tokenizer = inner_tokenizer(wrapper)
        self.added_tokens: dict[int, Any] = dict(self._tokenizer.added_tokens_decoder)
        self.backend = _rust_tokenizer(self._tokenizer)
        self.byte_level = self.backend is not None and _is_byte_level(self.backend)
        self._pieces: dict[int, bytes] = {}
        self._bytes = _bytes_by_character()
        self._habits: dict[str, TemplateHabits] = {}
        # Unicode normalization merges at most a few characters into one.
        self._token_characters_max = 4 * max(map(len, self._tokenizer.get_vocab()), default=1)
        self.infill_marks = infill_marks(self._tokenizer.get_vocab())
        self.end_tokens = frozenset(wrapper.eos_token_ids)
        self.hidden_tokens = self.end_tokens | frozenset(self._tokenizer.all_special_ids) | self._special_added()
        self.has_tool_calls = bool(wrapper.has_tool_calling and wrapper.tool_parser)
        self.tool_call_start: str = wrapper.tool_call_start or ""
        self.tool_call_end: str = wrapper.tool_call_end or ""
        self.tool_parser: Callable[[str, Any], Any] | None = wrapper.tool_parser
        markers = (*(wrapper.tool_call_start_tokens or ()), *(wrapper.tool_call_end_tokens or ()))
        self.tool_call_tokens = frozenset(markers) - self.end_tokens
        self.has_thinking = bool(wrapper.has_thinking)
        self.think_start: str = wrapper.think_start or ""
        self.think_end: str = wrapper.think_end or ""
        markers = (*(wrapper.think_start_tokens or ()), *(wrapper.think_end_tokens or ()))
        self.think_tokens = frozenset(markers) - self.end_tokens
        vocabulary, template = self._tokenizer.get_vocab(), self.template()
        self.is_harmony = harmony.is_harmony(template, vocabulary)
        self.harmony_tokens: frozenset[int] = frozenset()
        if self.is_harmony:
            self.has_tool_calls = harmony.has_calls(template)
            self.harmony_tokens = frozenset(vocabulary[marker] for marker in harmony.MARKERS) - self.end_tokens
        self.template_tools: TemplateTools | None = None
        self._unshown_calls: KeyedFormat | None = None
        self._unshown_calls = unshown_format(self)
        self.template_calls: TemplateCalls | KeyedCalls | None = None
        if not self.has_tool_calls and (calls := find_calls(self)) is not None:
            self.template_calls, self.has_tool_calls = calls, True
            self.tool_call_start, self.tool_parser = calls.start, calls.parse
        if not self.is_harmony and self.shown_calls:
            # All that the template writes around calls may be a part of one.
            written = frozenset(self.encode(self.shown_calls)) & self.hidden_tokens
            self.tool_call_tokens |= written - self.end_tokens - self.think_tokens - frozenset(self.begin_tokens)
        if not self.is_harmony:
            self.template_tools = tools_of(self)

    def _special_added(self) -> frozenset[int]:
        return frozenset(token for token, entry in self.added_tokens.items() if entry.special)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        at: datetime | None = None,
    ) -> str:
        """Returns the prompt text of a conversation, guarded as far as what is given is (see `control_tokens`).

        Args:
            template_kwargs: variables for the template, such as `enable_thinking`.
            generation_prompt: whether the text ends with the beginning of the assistant's message.
            at: the time whose date the template shows, as far as that can be chosen; None for now.

        Raises:
            InvalidRequest: the model has no chat template, its template refuses these messages, or a variable has a
                reserved name.
        """
        if not self._wrapper.has_chat_template:
            raise InvalidRequest(f"the model {self.name!r} has no chat template; use /v1/completions", param="model")
        if self.is_harmony:
            messages = harmony.for_template(messages)
        if self._unshown_calls is not None:
            messages = with_calls(messages, self._unshown_calls)
        elif self.template_tools is not None:
            messages = self.template_tools.shown(messages)
        if tools and self.template_tools is not None and not self.template_tools.shows_tools:
            messages, tools = self.template_tools.with_tools(messages, tools), None
        extra = dict(template_kwargs or {})
        if extra and (taken := _taken_names() & extra.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs: {min(taken)!r} is not for callers to set", param="chat_template_kwargs"
            )
        if extra:
            extra = with_thinking(self.template(tools), extra)
        if at is not None and (template := dated(self.template(tools))) is not None:
            extra |= {"chat_template": template.text} | template.variables(at)
        try:
            rendered = self._applied(messages, tools, {"add_generation_prompt": generation_prompt, **extra})
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the model's chat template refused: {unbroken(reason)}", param="messages") from error
        return self.controls.rendered(rendered) if ESCAPED_BREAK in rendered else rendered

    def _applied(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, extra: Any) -> str:
        """Raises whatever a template does: it is a program of the model's author."""
        apply = self._wrapper.apply_chat_template
        try:
            return apply(messages, tools=tools or None, tokenize=False, **extra)
        except Exception as error:
            if "'functions' is undefined" in str(error):
                # The name of the tools in old templates, which take them as text.
                listed = json.dumps([tool["function"] for tool in tools or ()], ensure_ascii=False)
                old = {"functions": listed, "datetime": f"{datetime.now():%b %d %Y}"}
                return apply(messages, tools=tools or None, tokenize=False, **old, **extra)
            if tools:
                raise
            # Some templates go through the tools without asking whether there are any.
            return apply(messages, tools=[], tokenize=False, **extra)

    def template(self, tools: list[dict[str, Any]] | None = None) -> str:
        """Returns the chat template's text; "" if there is none, or the conversation is rendered by Python code."""
        if (
            not self._wrapper.has_chat_template
            or renders_by_code(self._wrapper)
            or not _renders_templates(self._tokenizer)
        ):
            return ""
        try:
            return self._tokenizer.get_chat_template(tools=tools or None)
        except ValueError:
            # It has several, and none for conversations like this one.
            return ""

    def habits(self, template_kwargs: Mapping[str, Any] | None = None) -> TemplateHabits:
        """Returns what the chat template forgets of a conversation, which takes milliseconds at the first call with
        these variables."""
        key = json.dumps(template_kwargs or {}, sort_keys=True, default=str)
        if (known := self._habits.get(key)) is None:
            if len(self._habits) >= _HABITS_MAX:
                self._habits.clear()
            known = self._habits[key] = habits_of(self, template_kwargs or {})
        return known

    @cached_property
    def shown_calls(self) -> str:
        """What the chat template writes for two calls, or for one; "" if it shows none."""
        return next((written for count in (2, 1) for written, _ in rendered_calls(self, count)), "")

    @cached_property
    def calls_by_name(self) -> bool:
        """Whether the chat template writes a call as an object whose only key is the name."""
        return SHOWN_BY_NAME in self.shown_calls

    @cached_property
    def shows_date(self) -> bool:
        """Whether the chat template shows the date."""
        return shows_date(self.template())

    def plain(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens` with the model's own in the place of words (see `protocol.media_ids`)."""
        if self.pictures is None or not any(map(is_media_token, tokens)):
            return tokens
        return array("I", [self.pictures.token_of(token) if is_media_token(token) else token for token in tokens])

    def ends_in_thought(self, prompt: str) -> bool:
        """Returns whether `prompt` ends inside an open reasoning block, so that the answer begins with reasoning."""
        if not self.has_thinking:
            return False
        at = prompt.rfind(self.think_start)
        return at >= 0 and not prompt[at + len(self.think_start) :].strip()

    def may_think(self, prompt: str) -> bool:
        """Returns whether an answer to `prompt` may begin with reasoning: it does not end with a closed block."""
        return self.is_harmony or (self.has_thinking and not prompt.rstrip().endswith(self.think_end))

    def tokenizer_json(self) -> str:
        """Returns the tokenizer as `tokenizers` writes it.

        Raises:
            InvalidRequest: Python code wraps it, so that others cannot follow it.
        """
        if self.backend is None:
            raise InvalidRequest(f"the tokenizer of {self.name!r} is written in Python: its answers cannot be bound")
        return self.backend.to_str()

    def prefilled(self, prompt: str, beginning: str) -> str:
        """Returns `prompt` with the `beginning` of the answer's content behind it; a block of reasoning that `prompt`
        has opened is closed first."""
        if self.is_harmony:
            prompt += harmony.FINAL
        elif self.ends_in_thought(prompt):
            prompt = f"{prompt.rstrip()}\n\n{self.think_end}\n\n"
        return prompt + beginning

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Returns the token ids of `text`, which may be guarded (see `control_tokens`). `special_tokens` adds those
        that the tokenizer puts around a text.

        Raises:
            InvalidRequest: `text` is not valid Unicode.
        """
        guarded = BREAK in text
        try:
            (unbroken(text) if guarded else text).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text with an unpaired surrogate at character {error.start}") from None
        if guarded:
            return self.guarded_encoder.encode(text, special_tokens=special_tokens).ids
        if self.backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens))
        # A batch of one, because `Tokenizer.encode` holds the interpreter lock and this does not.
        return self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids

    def encode_prompt(self, text: str, scope: str, *, special_tokens: bool = False) -> list[int]:
        """As `encode`, but takes less time for a text that goes on from an earlier one of the same `scope`."""
        around = self._around if special_tokens else ([], [])
        if self.backend is None or around is None:
            return self.encode(text, special_tokens=special_tokens)
        begin, end = around
        return [*begin, *self.recent.encode(text, scope), *end]

    @cached_property
    def spelling(self) -> Spelling:
        """The bytes of the tokens."""
        return Spelling(self)

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens."""
        return ControlTokens(self)

    @cached_property
    def guarded_encoder(self) -> GuardedEncoder:
        """Encodes texts in which some marks are no control tokens."""
        return GuardedEncoder(self)

    @cached_property
    def given_answers(self) -> GivenAnswers:
        """The answers that were given lately and name control tokens."""
        return GivenAnswers()

    @cached_property
    def recent(self) -> RecentTexts:
        """The prompts that were encoded lately."""
        return RecentTexts(self)

    @property
    def begin_tokens(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        return self._around[0] if self._around else []

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens that the tokenizer puts before and after a text; None if it does something else to it."""
        whole, bare = self.encode("a", special_tokens=True), self.encode("a")
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    @property
    def closing_tokens(self) -> list[int]:
        """The special tokens that the tokenizer puts after a text."""
        return self._around[1] if self._around else []

    def token_of(self, word: str) -> int | None:
        """Returns the token that a word is, None if it has several."""
        tokens = self.encode(word)
        return tokens[0] if len(tokens) == 1 else None

    def word_tokens(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of words, each as it begins a text and as it follows a space."""
        spelled = (self.encode(form) for word in words for form in (word, f" {word.lstrip()}"))
        return [list(tokens) for tokens in dict.fromkeys(map(tuple, spelled)) if tokens]

    def tokens_min(self, text: str, enough: int) -> int:
        """Returns a lower bound of the number of tokens in `text`. A text with far more than `enough` tokens is not
        encoded whole, which would take seconds and much memory."""
        least = len(text) // self._token_characters_max
        if least >= enough or self.backend is None or len(text) <= _LONG_TOKEN_CHARACTERS * enough:
            return least
        tokens = 0
        for start in range(0, len(text), _COUNTED_CHARACTERS):
            piece = text[start : start + _COUNTED_CHARACTERS].encode("utf-8", "replace").decode()
            # A cut adds a few tokens, but never doubles their number.
            tokens += len(self.backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            if tokens >= 2 * enough:
                break
        return max(least, tokens // 2)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`, special tokens included."""
        if self.backend is not None:
            return self.backend.decode(list(tokens), skip_special_tokens=False)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def written(self, tokens: Sequence[int]) -> list[str]:
        """Returns how the tokenizer's vocabulary writes each token, "" for those that it does not have."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(list(tokens))]

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """Returns a new detokenizer for one row. `context` are the tokens that the text continues, if any."""
        if self.byte_level:
            return ByteDetokenizer(self._piece)
        return WindowDetokenizer(self.decode, context)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of `token` in the middle of a text. If not `byte_level`, neighbours may change them."""
        if self.byte_level:
            return self._piece(token)
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes_alone(token)
        return piece

    def _bytes_alone(self, token: int) -> bytes:
        if self.backend is not None and (byte := _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token) or "")):
            return bytes.fromhex(byte[1])
        # Decoders may strip a leading space, but not the space of a second token.
        return self.decode([token, token])[len(self.decode([token])) :].encode()

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            assert self.backend is not None
            # Models may pad their vocabulary with ids that the tokenizer does not have; they have no text.
            written = self.backend.id_to_token(token) or ""
            try:
                piece = bytes([self._bytes[character] for character in written])
            except KeyError:
                piece = written.encode("utf-8")
            self._pieces[token] = piece
        return piece


def _taken_names() -> set[str]:
    """Returns the template arguments that transformers and `render` set themselves."""
    from transformers import PreTrainedTokenizerBase

    return {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "conversations"}


def _rust_tokenizer(tokenizer: Any) -> Any | None:
    """Returns the inner `tokenizers.Tokenizer`, or None if Python code wraps its encoding or decoding.

    Using it directly makes encoding thread-safe: transformers' own `encode` sets truncation on shared state.
    """
    from transformers import PreTrainedTokenizerBase

    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer)
    if backend is None or kind.encode is not PreTrainedTokenizerBase.encode:
        return None
    if kind.decode is not PreTrainedTokenizerBase.decode:
        return None
    backend.no_truncation()
    backend.no_padding()
    mend_decoder(backend)
    return backend


def _renders_templates(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def _is_byte_level(backend: Any) -> bool:
    from tokenizers import decoders

    return isinstance(backend.decoder, decoders.ByteLevel)


def import_libraries() -> None:
    """Imports what `load_text_model` uses, ahead of time."""
    from mlx_lm import tokenizer_utils  # noqa: F401


def load_text_model(folder: str | Path, *, name: str = "", trusted: bool = False) -> TextModel:
    """Loads the text side of the model in `folder`, whose own code runs only if it is `trusted`. Takes up to seconds.

    Raises:
        ModelLoadError: the tokenizer is absent or does not load.
    """
    path = Path(folder)
    name = name or path.name
    with own_code_only(name, path, trusted=trusted), without_nulls(path) as read:
        try:
            wrapper = _tokenizer(read, {"trust_remote_code": trusted} | _template_elsewhere(path))
        except ModelLoadError:
            # It needs code that nobody trusts.
            raise
        except (Exception, SystemExit) as error:
            # Libraries raise anything, and some end the process.
            raise ModelLoadError(f"the tokenizer of {name!r} does not load: {first_sentence(error)}") from error
    # transformers makes an empty one of a tokenizer_config.json alone.
    if len(wrapper.get_vocab().keys() - {entry.content for entry in wrapper.added_tokens_decoder.values()}) < 2:
        raise ModelLoadError(
            f"the tokenizer of {name!r} has no vocabulary: its folder lacks tokenizer.json or the like"
        )
    pictures = _pictures(path, trusted=trusted)
    return TextModel(wrapper, name=name, sampling=_own_sampling(path), pictures=pictures, script=Script.read(path))


def _tokenizer(path: Path, options: dict[str, Any]) -> Any:
    # Imported here because mlx_lm brings MLX with it, which only processes that serve text need.
    from huggingface_hub.errors import StrictDataclassError
    from mlx_lm import tokenizer_utils
    from transformers import PreTrainedConfig

    ends = sorted(read_end_tokens(path)) or None
    try:
        return tokenizer_utils.load(path, options, eos_token_ids=ends)
    except StrictDataclassError as error:
        # The model's settings are not what transformers' own code for it wants. It is not that code which computes, and
        # a tokenizer has settings of its own.
        logger.info("the config of %s is not what transformers wants: %s", path.name, first_sentence(error))
        options = options | {"config": PreTrainedConfig.from_pretrained(path)}
        return tokenizer_utils.load(path, options, eos_token_ids=ends)


def _template_elsewhere(path: Path) -> dict[str, str]:
    """The chat template of the file that older processors have, if the tokenizer's own files have none."""
    try:
        own = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if own or (path / "chat_template.jinja").is_file():
            return {}
        template = json.loads((path / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {"chat_template": template} if isinstance(template, str) else {}


def _pictures(path: Path, *, trusted: bool) -> PictureProcessor | None:
    if not sees(path):
        return None
    try:
        return PictureProcessor.load(path, trusted=trusted)
    except ModelLoadError:
        raise
    except (Exception, SystemExit) as error:
        # The replica then serves the model for text only, and reports that.
        logger.warning("%s takes no pictures here: %s", path.name, in_words(error, path))
        return None


def _own_sampling(path: Path) -> dict[str, float]:
    """Returns the sampling defaults in generation_config.json; `do_sample: false` is greedy. Omits values out of
    range."""
    try:
        config = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    limits = {
        "temperature": (0.0, 10.0),
        "top_p": (0.0, 1.0),
        "top_k": (0, 2**31 - 1),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-9, 10.0),
    }
    own = {name: config[name] for name in limits if type(config.get(name)) in (int, float)}
    own = {name: value for name, value in own.items() if limits[name][0] <= value <= limits[name][1]}
    if config.get("do_sample") is False:
        # Greedy decoding ignores the filters, but not the penalty.
        own = {"temperature": 0.0} | {name: own[name] for name in ("repetition_penalty",) if name in own}
    return own
