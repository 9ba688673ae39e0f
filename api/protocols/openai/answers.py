"""OpenAI's wire format on the way out: response bodies and stream chunks."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ....actors.protocol.replica_messages import EmbeddingInfo, ImageInfo, ModelInfo
from ....actors.protocol.speech_messages import SpeechInfo
from ....cluster.errors import SatchelError
from ...http.error_shapes import openai_error
from ...pipeline.streams import WAITING, Answer, Finished, TextStream, Usage
from ...requests.backend import ListedModel, ServedModel
from ...requests.remembered import Remembered
from ...text.answers.logprobs import ShownToken, chat_logprobs, completion_logprobs
from ...text.answers.sequence_text import TextDelta
from ...tools.answer_pieces import CallArguments, CallBegun, ToolCall
from ...views.models import stage_views
from .functions import called_body, reason_of

_FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class AnswerStyle:
    """How the request wants its answer shown.

    Attributes:
        fingerprint: the value of `system_fingerprint`.
        functions: whether calls have the older form (`functions.py`).
        include_usage: whether a stream ends with its usage; with `continuous_usage` every chunk has the usage so far.
    """

    fingerprint: str = ""
    functions: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def system_fingerprint(model: ServedModel, version: str) -> str:
    """Returns a short hash of the model and the `version` of Satchel that computes it."""
    return f"fp_{hashlib.sha256(model.info.model_id + version.encode()).hexdigest()[:_FINGERPRINT_DIGITS]}"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _tool_call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _token_ids(answer: Answer, *, prompt: bool) -> dict[str, Any]:
    """Returns the token ids of an answer and its prompt, under vLLM's names; {} if not requested."""
    if answer.tokens is None:
        return {}
    return {"token_ids": answer.tokens} | ({"prompt_token_ids": answer.prompt} if prompt else {})


def _chat_choice(index: int, answer: Answer, style: AnswerStyle) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        # The first is DeepSeek's name, the second that of OpenRouter and newer versions of vLLM.
        message["reasoning_content"] = message["reasoning"] = answer.reasoning
    reason = answer.reason
    if answer.tool_calls and style.functions:
        message["function_call"] = called_body(answer.tool_calls[0])
        reason = reason_of(reason)
    elif answer.tool_calls:
        message["tool_calls"] = [_tool_call_body(call) for call in answer.tool_calls]
    logprobs = None if answer.logprobs is None else chat_logprobs(answer.logprobs)
    choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
    return choice | _token_ids(answer, prompt=False)


def _completion_choice(index: int, answer: Answer, style: AnswerStyle) -> dict[str, Any]:
    logprobs = None if answer.logprobs is None else completion_logprobs(answer.logprobs)
    choice = {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.reason}
    return choice | _token_ids(answer, prompt=True)


def chat_body(
    model: str, answers: list[Answer], remembered: Remembered | None = None, style: AnswerStyle = AnswerStyle()
) -> dict[str, Any]:
    """Returns a `chat.completion`. `content` is "" if the answer has only tool calls or reasoning; `satchel` reports
    what is missing in its agent's memory."""
    body = _body("chatcmpl", "chat.completion", model, answers, _chat_choice, style)
    prompt = {} if answers[0].prompt is None else {"prompt_token_ids": answers[0].prompt}
    return body | prompt | _memory_field(remembered)


def completion_body(
    model: str, answers: list[Answer], style: AnswerStyle = AnswerStyle(), usage: Usage | None = None
) -> dict[str, Any]:
    """Returns a `text_completion`; the choices of the first prompt come first. `usage` is given if more answers were
    generated than are shown."""
    body = _body("cmpl", "text_completion", model, answers, _completion_choice, style)
    return body if usage is None else body | {"usage": usage_body(usage)}


def best_answers(answers: Sequence[Answer], sequences: int, choices: int) -> list[Answer]:
    """Returns the likeliest answers of every prompt: those with the largest mean logprob per token.

    Args:
        answers: with logprobs, `sequences` of the first prompt, then of the next.
        choices: how many are returned for each prompt, the likeliest first.
    """

    def mean(answer: Answer) -> float:
        found = [token.logprob for token in answer.logprobs or () if token.logprob is not None]
        return sum(found) / len(found) if found else float("-inf")

    groups = [answers[start : start + sequences] for start in range(0, len(answers), sequences)]
    return [answer for group in groups for answer in sorted(group, key=mean, reverse=True)[:choices]]


def _body(
    prefix: str,
    kind: str,
    model: str,
    answers: list[Answer],
    choice: Callable[[int, Answer, AnswerStyle], dict[str, Any]],
    style: AnswerStyle,
) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": style.fingerprint or None,
        "choices": [choice(index, answer, style) for index, answer in enumerate(answers)],
        "usage": usage_body(sum((answer.usage for answer in answers), Usage(0, 0, 0))),
    }


def _memory_field(remembered: Remembered | None) -> dict[str, Any]:
    """Returns the field `satchel`, or {} if there is nothing to report."""
    body = None if remembered is None else remembered.body
    return {} if body is None else {"satchel": body}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n\n"


DONE = b"data: [DONE]\n\n"


def failed_event(error: SatchelError, request_id: str) -> bytes:
    """Returns the last event of a stream that failed."""
    return _event(openai_error(error.status, error.message, code=error.code, param=error.param))


class _Chunks:
    """Server-sent events of one streamed answer. JSON escapes keep them ASCII, so they contain no line separator."""

    def __init__(self, id: str, kind: str, model: str, style: AnswerStyle) -> None:
        head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        head["system_fingerprint"] = style.fingerprint or None
        self._head = f"data: {json.dumps(head, separators=(',', ':'))[:-1]},"
        self._include_usage = style.include_usage
        self._style = style
        self._streams: Sequence[TextStream] = ()
        self._said = False
        """Whether any part of the answer has been written, not only its first event."""

    def _usage_so_far(self) -> str:
        if not self._style.continuous_usage:
            return "null"
        usage = sum((stream.usage for stream in self._streams), Usage(0, 0, 0))
        return json.dumps(usage_body(usage if self._said else replace(usage, completion_tokens=0, reasoning_tokens=0)))

    def _chunk(self, choice: str, more: str = "") -> bytes:
        # Built from strings because it runs for every token of every client.
        tail = f',"usage":{self._usage_so_far()}{more}}}\n\n' if self._include_usage else f"{more}}}\n\n"
        return f'{self._head}"choices":[{choice}]{tail}'.encode("ascii")

    @property
    def idle(self) -> bytes:
        return WAITING

    def end(self, total: Usage) -> bytes:
        if not self._include_usage:
            return DONE
        return f'{self._head}"choices":[],"usage":{json.dumps(usage_body(total))}}}\n\n'.encode("ascii") + DONE

    def failed(self, error: SatchelError, request_id: str) -> bytes:
        return failed_event(error, request_id)


class ChatChunks(_Chunks):
    """Chunks of a streamed chat: `start` once, then text and calls, `finish` for every choice, then `end`. A call comes
    whole, or its name first and then its arguments as they are written."""

    def __init__(self, model: str, style: AnswerStyle) -> None:
        super().__init__(f"chatcmpl-{secrets.token_hex(12)}", "chat.completion.chunk", model, style)

    def _delta(
        self, index: int, delta: str, *, logprobs: str = "null", reason: str = "null", ids: str = "", more: str = ""
    ) -> bytes:
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
        return self._chunk(choice, more)

    def start(self, streams: Sequence[TextStream]) -> bytes:
        self._streams = streams
        prompt = _field("prompt_token_ids", streams[0].prompt)
        role = '{"role":"assistant","content":""}'
        begun = b"".join(self._delta(index, role, more="" if index else prompt) for index in range(len(streams)))
        self._said = True
        return begun

    def text(self, index: int, delta: TextDelta) -> bytes:
        logprobs = _logprobs(chat_logprobs, delta.logprobs)
        return self._delta(index, f'{{"content":{json.dumps(delta.text)}}}', logprobs=logprobs)

    def reasoning(self, index: int, text: str) -> bytes:
        said = json.dumps(text)
        return self._delta(index, f'{{"reasoning_content":{said},"reasoning":{said}}}')

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        if self._style.functions:
            return self._delta(index, json.dumps({"function_call": called_body(call)}))
        return self._delta(index, json.dumps({"tool_calls": [{"index": call.index, **_tool_call_body(call)}]}))

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        return self.tool_call(index, ToolCall(call.index, call.id, call.name, ""))

    def call_arguments(self, index: int, more: CallArguments) -> bytes:
        delta: dict[str, Any] = {"tool_calls": [{"index": more.index, "function": {"arguments": more.text}}]}
        if self._style.functions:
            delta = {"function_call": {"arguments": more.text}}
        return self._delta(index, json.dumps(delta))

    def call_ended(self, index: int, call: ToolCall) -> bytes:
        return b""

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes:
        memory = _memory_field(remembered)
        more = "," + json.dumps(memory, separators=(",", ":"))[1:-1] if memory else ""
        reason = reason_of(finished.reason) if self._style.functions else finished.reason
        ids = _field("token_ids", self._streams[index].tokens)
        return self._delta(index, "{}", reason=json.dumps(reason), ids=ids, more=more)


class CompletionChunks(_Chunks):
    """Chunks of streamed completions; several choices interleave and differ by `index`."""

    def __init__(self, model: str, style: AnswerStyle) -> None:
        super().__init__(f"cmpl-{secrets.token_hex(12)}", "text_completion", model, style)

    def _choice(self, index: int, text: str, *, logprobs: str = "null", reason: str = "null", ids: str = "") -> bytes:
        choice = f'{{"index":{index},"text":{json.dumps(text)},"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
        return self._chunk(choice)

    def start(self, streams: Sequence[TextStream]) -> bytes:
        self._streams, self._said = streams, True
        return b""

    def text(self, index: int, delta: TextDelta) -> bytes:
        return self._choice(index, delta.text, logprobs=_logprobs(completion_logprobs, delta.logprobs))

    def reasoning(self, index: int, text: str) -> bytes:
        raise AssertionError("completions have no reasoning")

    def tool_call(self, index: int, call: ToolCall) -> bytes:
        raise AssertionError("completions have no tool calls")

    def call_begun(self, index: int, call: CallBegun) -> bytes:
        raise AssertionError("completions have no tool calls")

    def call_arguments(self, index: int, more: CallArguments) -> bytes:
        raise AssertionError("completions have no tool calls")

    def call_ended(self, index: int, call: ToolCall) -> bytes:
        raise AssertionError("completions have no tool calls")

    def finish(self, index: int, finished: Finished, remembered: Remembered | None = None) -> bytes:
        stream = self._streams[index]
        ids = _field("token_ids", stream.tokens) + _field("prompt_token_ids", stream.prompt)
        return self._choice(index, "", reason=json.dumps(finished.reason), ids=ids)


def _field(name: str, tokens: list[int] | None) -> str:
    """Returns a further field of a chunk, "" if it was not requested."""
    return "" if tokens is None else f',"{name}":{json.dumps(tokens, separators=(",", ":"))}'


def _logprobs(body: Callable[[list[ShownToken]], dict[str, Any]], tokens: list[ShownToken] | None) -> str:
    return "null" if tokens is None else json.dumps(body(tokens))


def unloaded_body(model: ListedModel) -> dict[str, Any]:
    """Returns an entry of the list of models for one that has not been loaded yet, so that its files are not known."""
    return _model_names(model.name, 0)


def _model_names(name: str, created: int) -> dict[str, Any]:
    """Returns the fields that every entry has: those of OpenAI's list of models, then those of Anthropic's."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    anthropic = {"type": "model", "display_name": name, "created_at": at, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": created, "owned_by": "satchel"} | anthropic


def model_body(model: ServedModel, notes: Sequence[str]) -> dict[str, Any]:
    """Returns an entry of the list of models. The context in tokens is `max_model_len`, as in vLLM, `context_length`,
    as in OpenRouter, and `max_input_tokens`, as in Anthropic's API. `architecture` lists the modalities, as in
    OpenRouter. `memory` says what its layers cache, `kv` the KV policy and the reason for it, and `embedding` how it
    embeds texts. `notes` say what is not served as configured, and what its chat template drops. `parent` is the model
    that an adapter belongs to, as in vLLM, else None. `proving` says what its self-test still checks, and since when
    (Unix time). `stages` says which layers of a divided model are on which node, and is empty for other models.
    `images` says how it makes images, and `speech` what it does with speech; None if it does not.
    """
    info = model.info
    return {
        **_model_names(info.name, info.created),
        "parent": info.parent or None,
        "max_model_len": info.context_tokens,
        "context_length": info.context_tokens,
        "max_input_tokens": info.context_tokens,
        "architecture": {
            "input_modalities": _input_modalities(info),
            "output_modalities": ["image" if info.images.family else "audio" if info.speech.speaks else "text"],
        },
        "memory": info.layers,
        "kv": {"policy": info.kv, "why": info.kv_why},
        "notes": list(notes),
        "proving": {"what": info.proving, "since": int(info.proving_since)} if info.proving else None,
        "embedding": _embedding_body(info.embedding),
        "stages": stage_views(info.stages),
        "images": _image_body(info.images),
        "speech": _speech_body(info.speech),
    }


def _input_modalities(info: ModelInfo) -> list[str]:
    if info.speech.listens:
        return ["audio"]
    pictures = ["image", "video"] if info.pictures else ["image"] if info.images.edits else []
    return ["text", *pictures, *(["audio"] if info.audio else [])]


def _speech_body(speech: SpeechInfo) -> dict[str, Any] | None:
    if not speech.family:
        return None
    takes = ("language", "prompt", "temperature") if speech.listens else ("speed", "instructions")
    return {
        "family": speech.family,
        "transcribes": speech.listens,
        "translates": speech.translates,
        "speaks": speech.speaks,
        "sample_rate": speech.rate,
        "times": [name for name in ("segments", "words") if getattr(speech, name)],
        "takes": [name for name in takes if getattr(speech, name)],
        "voices": speech.voices,
        "languages": speech.languages,
    }


def _image_body(images: ImageInfo) -> dict[str, Any] | None:
    if not images.family:
        return None
    return {
        "family": images.family,
        "generates": images.generates,
        "edits": images.edits,
        "steps": images.steps or images.edit_steps,
        "guidance": images.guidance or images.edit_guidance,
        "side": {"min": images.side_min, "max": images.side_max, "multiple": images.multiple},
    }


def _embedding_body(embedding: EmbeddingInfo) -> dict[str, Any]:
    if embedding.refusal:
        return {"supported": False, "reason": embedding.refusal}
    return {
        "supported": True,
        "dimensions": embedding.dimensions,
        "pooling": embedding.pooling,
        "normalized": embedding.normalized,
        "from_model_files": embedding.stated,
    }
