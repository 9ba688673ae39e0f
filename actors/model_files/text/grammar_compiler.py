"""Compiles grammars for a model's tokenizer, with llguidance.

A grammar constrains what a model may write. It is text in llguidance's Lark (or its JSON of several grammars). The
endpoint compiles it to refuse a wrong one at once, and a replica compiles it to follow it token by token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ....cluster.errors import InvalidRequest, ModelLoadError
from ..foreign_code import own_code_only
from .byte_level import mend_decoder
from .nulls import without_nulls

GRAMMAR_BYTES_MAX = 256 * 2**10
"""How long a grammar may be, as UTF-8. llguidance compiles by recursion, and a process ends if its stack overflows."""

_STACK_BYTES = 256 * 2**20
"""The stack of a thread that compiles. 3,000 rules that refer to one another overflow the usual 8 MiB; the most that
fit into `GRAMMAR_BYTES_MAX` do not overflow this. Only the used part takes memory."""

_KEPT = 32
"""How many compiled grammars are cached."""

_LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 100_000, "verbose_errors": False}
"""llguidance's limits of time and memory that differ from its defaults, because the whole batch waits for a step."""

_MESSAGE_CHARACTERS_MAX = 500


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and caches the last ones. Thread-safe. Making a compiler blocks all other
    threads, for 0.6 s with 150,000 tokens, and takes 160 MB.

    Args:
        tokenizer: as JSON, as `tokenizers.Tokenizer.to_str` writes it.
        end_tokens: the model's end-of-sequence tokens, all of which end a grammar.
        vocabulary_size: how many logits the model has; None for as many as the tokenizer has tokens.

    Raises:
        InvalidRequest: llguidance cannot read the tokenizer, or the model has no end-of-sequence token.
    """

    def __init__(self, tokenizer: str, end_tokens: Iterable[int], vocabulary_size: int | None = None) -> None:
        # Imported here, because only requests with a grammar need it.
        from llguidance import LLParserLimits, LLTokenizer

        ends = sorted(end_tokens)
        if not ends:
            raise InvalidRequest("this model has no end-of-sequence token, so no grammar can end its answers")
        try:
            try:
                self._tokenizer = LLTokenizer(tokenizer, eos_token=ends, n_vocab=vocabulary_size)
            except ValueError:
                # A tokenizer may have more tokens than the model has logits.
                self._tokenizer = LLTokenizer(tokenizer, eos_token=ends)
        except (ValueError, RuntimeError, TypeError) as error:
            raise InvalidRequest(f"this model's tokenizer cannot follow a grammar: {_short(error)}") from error
        self._limits = LLParserLimits(**_LIMITS)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()

    @property
    def tokens(self) -> int:
        """How many tokens a mask has bits for."""
        return self._tokenizer.vocab_size

    def is_special(self, token: int) -> bool:
        """Returns whether grammars can name the token only by its number, `<[7]>`."""
        return self._tokenizer.is_special_token(token)

    def matcher(self, grammar: str) -> Any:
        """Returns a new `LLMatcher` at the grammar's beginning. Takes up to a second if the grammar is new.

        Raises:
            InvalidRequest: it is longer than `GRAMMAR_BYTES_MAX`, or does not compile; the message is llguidance's.
        """
        if len(grammar.encode("utf-8", "replace")) > GRAMMAR_BYTES_MAX:
            raise InvalidRequest(f"the grammar is longer than {GRAMMAR_BYTES_MAX} bytes")
        # One at a time: parallel compilations would only slow each other and the running requests.
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is None:
                kept = _on_deep_stack(lambda: self._compiled(grammar))
                if kept.is_error():
                    raise InvalidRequest(_short(kept.get_error()))
                self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return kept.deep_copy()

    def _compiled(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            # The first mask builds the lexer, which copies share.
            matcher.compute_bitmask()
        return matcher


def follows_schema(schema: Mapping[str, Any]) -> bool:
    """Whether llguidance can follow a JSON schema, with any tokenizer."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not _on_deep_stack(lambda: LLMatcher.validate_grammar(grammar))


def _on_deep_stack(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns, or raises what it raises, on a thread with a stack of `_STACK_BYTES`."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    # The size applies to every thread that starts meanwhile, which does no harm.
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return done.result()


def load_compiler(
    folder: Path, name: str, end_tokens: Iterable[int], vocabulary_size: int, *, trusted: bool
) -> GrammarCompiler:
    """Returns the compiler of the model in `folder`, whose own code runs only if it is `trusted`. Takes seconds.

    Raises:
        InvalidRequest: its tokenizer cannot follow grammars.
        ModelLoadError: it does not load.
    """
    from transformers import AutoTokenizer

    with own_code_only(name, folder, trusted=trusted), without_nulls(folder) as read:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(read, trust_remote_code=trusted)
        except Exception as error:
            # A config's own classes raise this, too.
            raise ModelLoadError(f"the tokenizer of {name!r} does not load: {error}") from error
    return GrammarCompiler(tokenizer_json(tokenizer), end_tokens, vocabulary_size)


def tokenizer_json(tokenizer: Any) -> str:
    """Returns a tokenizer of transformers as JSON.

    Raises:
        InvalidRequest: it is not one of `tokenizers`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidRequest("this model's tokenizer is written in Python and cannot follow a grammar")
    mend_decoder(backend)
    return backend.to_str()


def _short(error: object) -> str:
    """Returns the first lines of llguidance's message, without the state that it prints behind."""
    text = re.split("\n<(?:state|non-verbose/)>", str(error))[0].strip()
    if text == "NoExtensionBias":
        return "no text can follow this: it only refers to itself, or excludes every text"
    return text if len(text) <= _MESSAGE_CHARACTERS_MAX else text[:_MESSAGE_CHARACTERS_MAX] + "…"
