"""Embeddings of texts, and documents ranked by a query: the pipeline that the HTTP endpoint and Python handles share.

A request is encoded in a worker thread, and goes to the backend as token ids. Independent of HTTP and Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...actors.model_files.sentence_modules import SentenceModules, read_sentence_modules
from ...actors.protocol.replica_messages import PoolingRequest
from ...cluster.errors import InvalidRequest
from ...cluster.telemetry.context import span
from ..requests.backend import ServedModel, Vectors
from ..requests.requests import Request
from ..text.model import TextModel
from ..text.pairs import pair_form
from .generation import Generator
from .kinds import check_pools
from .sending import sent_fields
from .spans import EMBEDDINGS, note_model, note_usage
from .vectors import EmbeddingRequest, RankingRequest, TokenTexts, embedding_texts, ranking_texts


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of a request's texts, `(texts, dimensions)` float32, in their order. `tokens` is how many tokens
    the texts have together; `replica`, `node` and `why` are as in `Vectors`."""

    model: ServedModel
    vectors: np.ndarray
    tokens: int
    replica: str
    node: str
    why: str


@dataclass(frozen=True)
class RankedDocument:
    """A document by its index in the request. If the model scores pairs, `score` is the probability that the document
    is relevant; else it is the cosine of its embedding and the query's."""

    index: int
    score: float


@dataclass(frozen=True)
class Ranking:
    """The documents of a request, the most relevant first; otherwise as `Embeddings`."""

    model: ServedModel
    documents: list[RankedDocument]
    tokens: int
    replica: str
    node: str
    why: str


Encode = Callable[[TextModel, ServedModel, SentenceModules], TokenTexts]


class Embedder:
    """Embeds and ranks on the generator's backend, with its tokenizers."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Returns the embeddings of texts.

        Raises:
            RequestError: the request is invalid, or the model does not support embeddings.
            Unavailable: no replica takes it now.
            DeadlineExceeded: it took too long.
        """

        def encode(text: TextModel, model: ServedModel, sentences: SentenceModules) -> TokenTexts:
            check_pools(model, "embeddings", "model")
            embedding = model.info.embedding
            if request.dimensions is not None and not 1 <= request.dimensions <= embedding.dimensions:
                message = f"dimensions: the model {model.info.name!r} has 1 to {embedding.dimensions}"
                raise InvalidRequest(message, param="dimensions")
            return embedding_texts(text.tokenizer, model, sentences, request)

        model, texts, answer = await self._run(request, encode)
        vectors = await asyncio.to_thread(_shortened, answer.array, request.dimensions, model.info.embedding.normalized)
        return Embeddings(model, vectors, texts.count, answer.replica, answer.node, answer.why)

    async def rank(self, request: RankingRequest) -> Ranking:
        """Returns documents by their relevance. Raises as `embed`."""
        if request.top_n is not None and request.top_n < 1:
            raise InvalidRequest("top_n: must be at least 1", param="top_n")

        def encode(text: TextModel, model: ServedModel, sentences: SentenceModules) -> TokenTexts:
            check_pools(model, "embeddings", "model")
            pairs = pair_form(text.tokenizer, text.template, sentences, f"{model.info.name} {model.info.folder}")
            return ranking_texts(text.tokenizer, model, sentences, pairs, request)

        model, texts, answer = await self._run(request, encode)
        vectors = answer.array
        scores = _probabilities(vectors[:, 0]) if texts.score else await asyncio.to_thread(_cosines, vectors)
        # Documents with equal scores stay in order.
        order = np.argsort(-scores, kind="stable")[: request.top_n]
        documents = [RankedDocument(int(index), float(scores[index])) for index in order]
        return Ranking(model, documents, texts.count, answer.replica, answer.node, answer.why)

    async def _run(self, request: Request, encode: Encode) -> tuple[ServedModel, TokenTexts, Vectors]:
        generator, caller = self._generator, request.caller
        async with generator.deadline(request, "the texts were not computed") as deadline:
            model = await generator.served(request.model, caller, any_model=request.any_model)
            priority = caller.priority(request.options.priority)
            text = await generator.text_model(model)

            def encoded() -> TokenTexts:
                return encode(text, model, read_sentence_modules(Path(model.info.folder)))

            texts = await asyncio.to_thread(encoded)
            note_model(EMBEDDINGS, request.model, model.info.name)
            note_usage(span(), texts.count)
            admitted = caller.admit(1, texts.count)
            try:
                pooling = PoolingRequest(
                    model=model.info.name,
                    texts=texts.tokens,
                    skipped=texts.skipped,
                    score=list(texts.score),
                    priority=priority,
                    **sent_fields(request, "texts", deadline),
                )
                return model, texts, await generator.backend.pool(model, pooling)
            finally:
                admitted.close()


def _shortened(vectors: np.ndarray, dimensions: int | None, normalized: bool) -> np.ndarray:
    """Returns the first `dimensions` of vectors, scaled to length 1 again if they are `normalized`."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions].astype(np.float64)
    if normalized:
        kept /= np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return kept.astype(np.float32)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns the logistic function of logits `(texts,)`."""
    # This form does not overflow.
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


def _cosines(vectors: np.ndarray) -> np.ndarray:
    """Returns the cosines of the first vector and each of the others."""
    unit = vectors.astype(np.float64)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    return unit[1:] @ unit[0]
