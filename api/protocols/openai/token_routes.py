"""The routes that convert between text and tokens, in vLLM's form. They queue no sequence."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ...http.adding import add_route
from ...http.answering import Answering
from ...http.exchange import CancelOnDisconnect
from .token_bodies import DetokenizeBody, TokenizeBody


class TokenRoutes:
    """Handlers for the tokens of a prompt, and for the text of tokens."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def add_to(self, app: FastAPI) -> None:
        """Adds the routes to `app`."""
        add_route(app, "POST", "/v1/tokenize", self.tokenize, TokenizeBody)
        add_route(app, "POST", "/v1/detokenize", self.detokenize, DetokenizeBody)

    async def tokenize(self, request: Request) -> Response:
        """Shows the tokens of a text, or of a conversation's prompt."""
        body = await self._answering.bodies.read(request, TokenizeBody)
        work = self._answering.complete(request, body.request(), any_model=False)
        special = bool(body.messages is not None and body.add_special_tokens)
        async with CancelOnDisconnect(request.receive):
            model, tokens, written = await self._answering.generator.tokenize(
                work, reply=body.reply, special_tokens=special, written=bool(body.return_token_strs)
            )
        shown = {
            "count": len(tokens),
            "max_model_len": model.info.context_tokens,
            "tokens": tokens,
            "token_strs": written,
        }
        return JSONResponse(shown)

    async def detokenize(self, request: Request) -> Response:
        """Shows the text of tokens."""
        body = await self._answering.bodies.read(request, DetokenizeBody)
        work = self._answering.complete(request, body.request(), any_model=False)
        async with CancelOnDisconnect(request.receive):
            text = await self._answering.generator.detokenize(work, body.tokens)
        return JSONResponse({"prompt": text})
