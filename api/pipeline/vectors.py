"""Requests for embeddings and rankings, and their texts as tokens. Encode in a worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...actors.model_files.sentence_modules import SentenceModules
from ...cluster.errors import InvalidRequest
from ..requests.backend import ServedModel
from ..requests.requests import Request, too_long
from ..text.callers_text import CallersText
from ..text.pairs import PairForm
from ..text.tokenizer import Tokenizer
from .prompts import check_vocabulary, entries

TEXTS_MAX = 2048
"""The most texts of one request, as at OpenAI."""

TOKENS_MAX = 2**20
"""The most tokens of all texts of one request together."""

_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""The names under which models have the prompt for documents, as sentence-transformers looks for it."""

_TOKEN_CHARACTERS = 16
"""Few texts have more characters per token."""


@dataclass(frozen=True)
class EmbeddingRequest(Request):
    """Texts to embed. `inputs` is a text or its token ids, or a list of either. `dimensions` is how many numbers of an
    embedding are returned, None for all. `special_tokens` adds those that the tokenizer puts around a text.

    With `truncate_prompt_tokens` only the first tokens of a text are kept, and the special tokens behind it.
    """

    inputs: str | list[str] | list[int] | list[list[int]]
    dimensions: int | None = None
    special_tokens: bool = True


@dataclass(frozen=True)
class RankingRequest(Request):
    """Documents to rank by their relevance for a query; `top_n` is how many are returned, None for all."""

    query: str
    documents: Sequence[str]
    top_n: int | None = None


@dataclass(frozen=True)
class TokenTexts:
    """Texts as tokens; `skipped` and `score` are as in `PoolingRequest`."""

    tokens: list[list[int]]
    skipped: list[int] = field(default_factory=list)
    score: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of tokens of all texts."""
        return sum(map(len, self.tokens))


def embedding_texts(
    tokenizer: Tokenizer, model: ServedModel, sentences: SentenceModules, request: EmbeddingRequest
) -> TokenTexts:
    """Encodes the texts of a request, each behind the model's default prompt if it has one.

    Raises:
        InvalidRequest: there are none or too many, one is empty, or a token id is not in the vocabulary.
        ContextLengthExceeded: one does not fit.
    """
    encoder = _Encoder(tokenizer, model, request.truncate_prompt_tokens, special_tokens=request.special_tokens)
    prompt = _Prompt.of(tokenizer, sentences, sentences.default_prompt)
    skipped: list[int] = []
    for where, each in entries(request.inputs, "input", TEXTS_MAX):
        if isinstance(each, str):
            encoder.add(prompt.text, each, where)
        else:
            encoder.add_tokens(each, where)
        skipped.append(prompt.skipped if isinstance(each, str) else 0)
    return TokenTexts(encoder.texts, skipped if any(skipped) else [])


def ranking_texts(
    tokenizer: Tokenizer,
    model: ServedModel,
    sentences: SentenceModules,
    pairs: PairForm | None,
    request: RankingRequest,
) -> TokenTexts:
    """If the model scores pairs, encodes each document together with the query. Else encodes the query and then the
    documents, to be embedded.

    Raises:
        InvalidRequest: there are no documents or too many, or a text is empty.
        ContextLengthExceeded: one does not fit.
    """
    if not 0 < len(request.documents) <= TEXTS_MAX:
        message = f"documents has {len(request.documents)} entries; 1 to {TEXTS_MAX} go into one request"
        raise InvalidRequest(message, param="documents")
    for where, given in (("query", request.query), *((f"documents[{i}]", d) for i, d in enumerate(request.documents))):
        if not given:
            raise InvalidRequest(f"{where} is empty", param=where)
    most = request.truncate_prompt_tokens
    if pairs is not None:
        encoder = _Encoder(tokenizer, model, most, special_tokens=False)
        for index, document in enumerate(request.documents):
            encoder.add_pair(pairs, request.query, document, f"documents[{index}]")
        return TokenTexts(encoder.texts, score=pairs.score)
    encoder = _Encoder(tokenizer, model, most, special_tokens=True)
    before = _Prompt.of(tokenizer, sentences, sentences.prompts.get("query", ""))
    names = (name for name in _DOCUMENT_PROMPTS if name in sentences.prompts)
    behind = _Prompt.of(tokenizer, sentences, sentences.prompts.get(next(names, ""), ""))
    encoder.add(before.text, request.query, "query")
    for index, document in enumerate(request.documents):
        encoder.add(behind.text, document, f"documents[{index}]")
    skipped = [before.skipped, *[behind.skipped] * len(request.documents)]
    return TokenTexts(encoder.texts, skipped if any(skipped) else [])


@dataclass(frozen=True)
class _Prompt:
    """What goes before a text, and how many of its tokens are left out of the pooling."""

    text: str = ""
    skipped: int = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, sentences: SentenceModules, prompt: str) -> _Prompt:
        if not prompt or sentences.include_prompt:
            return cls(prompt)
        return cls(prompt, len(tokenizer.begin_tokens) + len(tokenizer.encode(prompt)))


class _Encoder:
    """Encodes the texts of one request, within the limits of the model and of a request."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, most: int | None, *, special_tokens: bool) -> None:
        self.texts: list[list[int]] = []
        self._tokenizer, self._model, self._special = tokenizer, model, special_tokens
        self._guard = CallersText(tokenizer, as_tokens=model.marks_are_tokens)
        context = model.info.context_tokens
        self._most = None if most is None else context if most < 0 else most
        self._behind = len(tokenizer.closing_tokens) if special_tokens and most is not None else 0
        self._tokens = 0

    def add(self, prompt: str, given: str, where: str) -> None:
        if not given:
            raise InvalidRequest(f"{where} is empty", param=where.partition("[")[0])
        self._add(self._cut(self._encoded(prompt + self._guard.text(given), where)), where)

    def add_tokens(self, tokens: list[int], where: str) -> None:
        check_vocabulary(tokens, self._model.info.vocabulary_size, where)
        if not tokens:
            raise InvalidRequest(f"{where} is empty", param=where.partition("[")[0])
        self._add(tokens if self._most is None else tokens[: self._most], where)

    def add_pair(self, pairs: PairForm, query: str, document: str, where: str) -> None:
        """Adds a query and a document; the document is cut to the room that is left."""
        guard = self._guard.text
        query = guard(query)
        tokens = self._encoded(pairs.render(query, guard(document)), where)
        if self._most is not None and len(tokens) > self._most:
            rest = max(0, self._most - len(self._tokenizer.encode(pairs.render(query, ""))))
            kept = self._tokenizer.decode(self._tokenizer.encode(guard(document))[:rest])
            # Two texts joined may have a token more or fewer than both separately.
            tokens = self._tokenizer.encode(pairs.render(query, guard(kept)))
        self._add(tokens, where)

    def _encoded(self, given: str, where: str) -> list[int]:
        tokenizer, context = self._tokenizer, self._model.info.context_tokens
        if self._most is None:
            if (least := tokenizer.tokens_min(given, context + 1)) > context:
                raise too_long(least, self._model, where, at_least=True, answered=False)
            return tokenizer.encode(given, special_tokens=self._special)
        # Encoding megabytes takes seconds, and only the first tokens count.
        characters = _TOKEN_CHARACTERS * (self._most + 1)
        while characters < len(given):
            tokens = tokenizer.encode(given[:characters], special_tokens=self._special)
            if len(tokens) > self._most + _TOKEN_CHARACTERS:
                return tokens
            characters *= 4
        return tokenizer.encode(given, special_tokens=self._special)

    def _cut(self, tokens: list[int]) -> list[int]:
        if self._most is None or len(tokens) <= self._most:
            return tokens
        behind = min(self._behind, self._most)
        return [*tokens[: self._most - behind], *tokens[len(tokens) - behind :]]

    def _add(self, tokens: list[int], where: str) -> None:
        if not tokens:
            raise InvalidRequest(f"{where} has no tokens", param=where.partition("[")[0])
        if len(tokens) > self._model.info.context_tokens:
            raise too_long(len(tokens), self._model, where, answered=False)
        self._tokens += len(tokens)
        if self._tokens > TOKENS_MAX:
            message = f"the texts have more than {TOKENS_MAX} tokens together: send them in several requests"
            raise InvalidRequest(message, param=where.partition("[")[0])
        self.texts.append(tokens)
