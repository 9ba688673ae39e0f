"""What the routes of all protocols share: the request's agent, starting its sequences, and the response's headers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fastapi import Request

from ...cluster.config.config import Config
from ...cluster.errors import InvalidRequest, Unavailable
from ..pipeline.generation import Generator
from ..pipeline.streams import Answer, TextStream, collect_all
from ..requests.agent_identity import NOBODY, Identity, identify
from ..requests.backend import ListedModel, ServedModel
from ..requests.callers import Caller
from ..requests.fields.shared import AgentBody
from ..requests.options import Options
from ..requests.remembered import HEADER
from ..requests.requests import ChatRequest, CompletionRequest
from ..requests.requests import Request as Asked
from .exchange import BodyReader, CancelOnDisconnect, header_text

_PROBE_TIMEOUT_S = 10.0

USUAL = Options()

T = TypeVar("T")

Body = TypeVar("Body", bound=AgentBody)

Work = TypeVar("Work", bound=Asked)
"""A request to a model, made from a body."""


class Placed(Protocol):
    """An answer, or a part of one: the model, replica and node that gave it, and why it was routed there."""

    @property
    def model(self) -> ServedModel: ...
    @property
    def replica(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def why(self) -> str: ...


class Answering:
    """Starts requests, and waits for whole answers.

    Args:
        bodies: the reader of the requests' bodies.
    """

    def __init__(self, generator: Generator, config: Config, bodies: BodyReader) -> None:
        self.generator = generator
        self.bodies = bodies
        self._unknown_model = config.endpoint.unknown_model

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Returns the body, changed by the header `X-Agent-Continue`.

        Raises:
            InvalidRequest: the header is neither 0 nor 1, or contradicts the body; or as `BodyReader.read`.
            RequestTooLarge, Unavailable, SlowBody, ClientDisconnect: as `BodyReader.read`.
        """
        goes_on = _continues(request)
        body = await self.bodies.read(request, kind)
        if goes_on:
            body.agent_continue = True
            body.check()
        return body

    def whose(
        self, request: Request, *, agent_id: str | None, cache_salt: str | None = None, **fields: Any
    ) -> Identity:
        """Returns the agent of a request.

        Args:
            fields: further arguments of `identify`.

        Raises:
            InvalidRequest: the caller's name for the agent is not valid.
        """
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        identity = identify(headers, agent_id=agent_id, **fields)
        # `cache_salt` is only allowed without an agent. An agent that the caller did not name must not make it an
        # error.
        return NOBODY if cache_salt and not identity.named else identity

    def complete(self, request: Request, work: Work, whose: Identity = NOBODY, *, any_model: bool) -> Work:
        """Returns the request, completed with what is not in its body.

        Args:
            whose: the request's agent.
            any_model: whether clients of its protocol send names of models that are not served.
        """
        caller: Caller = request.state.caller
        # A response that continues another one belongs to that one's agent, whose program is already known.
        own = work.agent == whose.agent
        return replace(
            work,
            caller=caller,
            program=whose.program if own else "",
            parent=whose.parent if own else "",
            request_id=request.state.request_id,
            left_out=request.state.left_out,
            arrived=request.state.arrived,
            any_model=self.takes_any(any_model=any_model),
        )

    def takes_any(self, *, any_model: bool) -> bool:
        """Returns whether names of models that are not served are accepted.

        Args:
            any_model: what clients of the protocol expect, if `endpoint.unknown_model` is not set.
        """
        return any_model if self._unknown_model is None else self._unknown_model == "default"

    async def listed(self, request: Request) -> list[ListedModel]:
        """Returns every model that the caller may use, loaded or not, the default first.

        Raises:
            Unavailable: the cluster does not answer.
        """
        caller: Caller = request.state.caller
        return [model for model in await probe(self.generator.backend.listed()) if caller.may_use(model.name)]

    async def models(self, request: Request) -> list[ServedModel]:
        """Returns every loaded model that the caller may use, the default first.

        Raises:
            Unavailable: the cluster does not answer.
        """
        caller: Caller = request.state.caller
        return [model for model in await probe(self.generator.backend.models()) if caller.may_use(model.info.name)]

    async def served(self, request: Request, name: str) -> ServedModel:
        """Returns the model that would answer the caller's request for `name`, without loading it.

        Raises:
            ModelNotFound, NoReplica: as `Generator.served`.
            Unavailable: the cluster does not answer.
        """
        lenient = self.takes_any(any_model=False)
        return await probe(self.generator.served(name, request.state.caller, any_model=lenient, load=False))

    async def named(self, request: Request, name: str) -> ListedModel:
        """As `served`, for the entry of a model that may not be loaded."""
        return await probe(self.generator.named(name, request.state.caller, any_model=self.takes_any(any_model=False)))

    async def loaded(self, request: Request, name: str, options: Options = USUAL) -> ServedModel:
        """As `served`, but loads the model if it comes and goes.

        Args:
            options: of the request that needs it, whose deadline holds.

        Raises:
            ModelLoadError: it cannot be loaded.
            DeadlineExceeded: it is not loaded in time.
        """
        work = Asked(model=name, options=options, arrived=request.state.arrived, caller=request.state.caller)
        async with CancelOnDisconnect(request.receive), self.generator.deadline(work, "the model was not loaded"):
            return await self.generator.served(name, work.caller, any_model=self.takes_any(any_model=False))

    async def start(self, work: ChatRequest | CompletionRequest) -> list[TextStream]:
        """Starts all sequences of a request. Raises as `Generator.start_chats`."""
        if isinstance(work, ChatRequest):
            return await self.generator.start_chats(work)
        return await self.generator.start_completion(work)

    async def answer(
        self, request: Request, work: ChatRequest | CompletionRequest
    ) -> tuple[list[TextStream], list[Answer]]:
        """Returns the whole answers of a request, and the streams that they came from.

        Raises:
            SatchelError: it was refused or failed.
            ClientDisconnect: the client disconnected; all sequences were aborted.
        """
        async with CancelOnDisconnect(request.receive):
            streams = await self.start(work)
            answers = await collect_all(streams)
        return streams, answers

    def headers(self, work: ChatRequest | CompletionRequest, streams: Sequence[TextStream]) -> dict[str, str]:
        """Returns the headers of `placed`, and headers with the agent and what its memory lacks, as far as known."""
        memory = [stream.remembered.header for stream in streams if stream.remembered and stream.remembered.header]
        truncated = [str(stream.truncated_messages) for stream in streams[:1] if stream.truncated_messages]
        headers = {
            HEADER: memory,
            "x-satchel-agent": [work.agent] if work.agent else [],
            "x-satchel-truncated": truncated,
        }
        return self.placed(work, streams) | _joined(headers)

    @staticmethod
    def placed(work: Asked, answers: Sequence[Placed]) -> dict[str, str]:
        """Returns headers with the nodes, replicas and routing reasons of an answer's parts, each value once. If
        another model than the requested one answers, it is named too."""
        served = answers[0].model.info.name
        headers = {
            "x-satchel-node": dict.fromkeys(answer.node for answer in answers if answer.node),
            "x-satchel-replica": dict.fromkeys(answer.replica for answer in answers),
            "x-satchel-why": dict.fromkeys(answer.why for answer in answers),
            "x-satchel-model": [served] if work.model and work.model != served else [],
        }
        return _joined(headers)


def _joined(headers: Mapping[str, Iterable[str]]) -> dict[str, str]:
    joined = {name: header_text(", ".join(values)) for name, values in headers.items()}
    return {name: value for name, value in joined.items() if value}


async def probe(answer: Awaitable[T]) -> T:
    """Returns the cluster's answer to a cheap call.

    Raises:
        Unavailable: it does not answer in time.
    """
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            return await answer
    except TimeoutError:
        raise Unavailable(f"the cluster did not answer within {_PROBE_TIMEOUT_S:.0f} s") from None


def _continues(request: Request) -> bool:
    """Returns whether the header asks to append to the agent's transcript.

    Raises:
        InvalidRequest: it is neither 0 nor 1.
    """
    given = request.headers.get("x-agent-continue", "0").lower()
    if given not in ("0", "1", "false", "true"):
        raise InvalidRequest("X-Agent-Continue must be 0 or 1", param="X-Agent-Continue")
    return given in ("1", "true")
