"""The routes that generate nothing: embeddings in OpenAI's form, rankings in Jina's and Cohere's."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ...http.adding import add_route
from ...http.answering import Answering
from ...http.exchange import CancelOnDisconnect
from ...pipeline.embedding import Embedder
from .embedding_answers import embedding_json, ranking_body
from .embedding_bodies import EmbeddingBody, RankingBody

COHERE = "/v2/rerank"


class EmbeddingRoutes:
    """Handlers for embeddings and rankings."""

    def __init__(self, answering: Answering, embedder: Embedder) -> None:
        self._answering = answering
        self._embedder = embedder

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/embeddings", self.embeddings, EmbeddingBody)
        add_route(app, "POST", "/v1/rerank", self.rerank, RankingBody)
        add_route(app, "POST", COHERE, self.rerank, RankingBody)

    async def embeddings(self, request: Request) -> Response:
        """Embeds one or several texts."""
        body = await self._answering.bodies.read(request, EmbeddingBody)
        work = self._answering.complete(request, body.request(), any_model=False)
        async with CancelOnDisconnect(request.receive):
            made = await self._embedder.embed(work)
        shown = await asyncio.to_thread(embedding_json, made, base64_encoded=body.encoding_format == "base64")
        return Response(shown, headers=self._answering.placed(work, [made]), media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        """Ranks documents by their relevance for a query."""
        body = await self._answering.bodies.read(request, RankingBody)
        work = self._answering.complete(request, body.request(), any_model=False)
        async with CancelOnDisconnect(request.receive):
            made = await self._embedder.rank(work)
        # Cohere's clients need no documents in the answer; Jina's and vLLM's expect them.
        shows = body.return_documents if body.return_documents is not None else request.url.path != COHERE
        shown = ranking_body(made, body.texts if shows else None)
        return JSONResponse(shown, headers=self._answering.placed(work, [made]))
