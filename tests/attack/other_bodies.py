"""Bodies of the routes besides OpenAI's oldest: Responses, Anthropic's, Ollama's, vectors, tokens, satchels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORDS = (
    "",
    "a",
    "0",
    "-1",
    "true",
    "null",
    "é",
    "\u0000",
    "\u202e",
    "😀" * 9,
    "x" * 3000,
    "<|im_end|>",
    "../..",
    "low",
)
ADDRESSES = (
    *(
        "data:image/png;base64,AAAA",
        "data:,",
        "file:///etc/passwd",
        "http://127.0.0.1:1/x",
        "http://[::ffff:127.0.0.1]/",
    ),
    *("http://0x7f.1/", "picture:" + "0" * 64 + "/1x1", "/etc/passwd", "", 5, None),
)
ARGUMENTS = ("{}", '{"a":1}', "[1]", "null", "{", "[" * 500, '{"a":NaN}', 5, None)
AGENTS = ("ann", "bob", "eve", "..", ".", "@", ":", "a" * 128, "a" * 129, "%00", "é")
_TYPES = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "item_reference")
_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "", None)
_RESPONSE_FIELDS = (
    *("model", "stream", "store", "include", "metadata", "temperature", "top_p", "top_logprobs", "max_tool_calls"),
    *("instructions", "previous_response_id", "conversation", "tools", "tool_choice", "parallel_tool_calls", "text"),
    *("reasoning", "truncation", "prompt", "background", "user", "prompt_cache_key", "agent_id", "agent_continue"),
)
_MESSAGE_FIELDS = (
    *("model", "stream", "system", "metadata", "stop_sequences", "temperature", "top_k", "top_p", "tools"),
    *("tool_choice", "thinking", "output_config", "context_management", "mcp_servers", "container", "agent_id"),
)
_OLLAMA_FIELDS = (
    *("stream", "options", "format", "keep_alive", "think", "tools", "images", "system", "template", "raw", "suffix"),
    *("context", "logprobs", "truncate", "dimensions", "agent_id"),
)
_OPTIONS = ("num_predict", "num_ctx", "temperature", "seed", "stop", "top_k", "mirostat", "invented")
_IDS = ("resp_" + "0" * 48, "resp_", "x", "%00", "é".encode().hex(), "..", "a" * 300)


@dataclass(frozen=True)
class Drawn:
    """A request; its body is bytes, or becomes JSON."""

    method: str
    path: str
    body: Any = None
    agent: str = ""


class OtherBodies:
    """Requests to these routes.

    Args:
        odd: draws a value of any type; its argument is how deep it is already.
    """

    def __init__(self, chance: random.Random, models: tuple[str, ...], odd: Callable[[int], Any]) -> None:
        self._chance = chance
        self._models = models
        self._odd = odd

    def _with(self, body: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
        """The body with some fields of any value."""
        for _ in range(self._chance.choice((0, 0, 0, 1, 1, 3))):
            body[self._chance.choice(fields)] = self._odd(0)
        return body

    def _agent(self) -> str:
        return self._chance.choice(AGENTS) if self._chance.random() < 0.2 else ""

    def _named(self) -> dict[str, Any]:
        return {"model": self._chance.choice(self._models)} if self._chance.random() < 0.8 else {}

    def _item(self) -> Any:
        chance = self._chance
        text = {"type": chance.choice(("input_text", "output_text", "refusal")), "text": chance.choice(WORDS)}
        image = {"type": "input_image", "image_url": chance.choice(ADDRESSES), "detail": "low"}
        content = chance.choice((chance.choice(WORDS), [text], [text, image], self._odd(1)))
        item = {"type": chance.choice(_TYPES), "role": chance.choice(("user", "assistant", "developer", "x", None))}
        item |= {"content": content, "call_id": "c", "name": "f", "id": chance.choice(("m_1", 5, None))}
        item |= {"arguments": chance.choice(ARGUMENTS), "output": content, "input": chance.choice(WORDS)}
        for key in chance.sample(sorted(item), chance.choice((0, 0, 1, 3))):
            item[key] = self._odd(2)
        return chance.choice((item, item, item, {"role": "user", "content": content}, self._odd(0)))

    def response(self) -> Drawn:
        chance = self._chance
        kind = chance.random()
        if kind < 0.25:
            id, after = chance.choice(_IDS), chance.choice(("0", "-1", "7", "x", "9" * 30))
            paths = (f"/{id}", f"/{id}/input_items?limit={after}", f"/{id}?stream=true&starting_after={after}")
            path, method = chance.choice(paths), chance.choice(("GET", "GET", "DELETE"))
            path, method = (f"/{id}/cancel", "POST") if kind < 0.05 else (path, method)
            return Drawn(method, f"/v1/responses{path}")
        items = chance.choice(("Hi", [self._item() for _ in range(chance.randint(0, 4))], self._odd(0)))
        body = self._with({**self._named(), "input": items}, _RESPONSE_FIELDS)
        if kind < 0.35:
            return Drawn("POST", "/v1/responses/input_tokens", body)
        if kind < 0.5:
            body |= {"background": True, "stream": chance.random() < 0.5}
        return Drawn("POST", "/v1/responses", {**body, "max_output_tokens": chance.choice((1, 2, 4))}, self._agent())

    def _block(self) -> Any:
        chance = self._chance
        source = {"type": chance.choice(("base64", "url", "file", None)), "media_type": "image/png"}
        source |= {"data": chance.choice(WORDS), "url": chance.choice(ADDRESSES)}
        block = {"type": chance.choice(_BLOCKS), "text": chance.choice(WORDS), "source": source, "id": "t", "name": "f"}
        block |= {"input": chance.choice(({}, self._odd(2))), "tool_use_id": "t", "content": chance.choice(WORDS)}
        block |= {"thinking": "x", "signature": chance.choice(WORDS), "cache_control": {"type": "ephemeral"}}
        return block if chance.random() < 0.9 else self._odd(1)

    def message(self) -> Drawn:
        chance = self._chance
        content = [[self._block() for _ in range(chance.randint(0, 3))], chance.choice(WORDS), self._odd(1)]
        roles = ("user", "user", "assistant", "system", "tool", 5)
        said = [{"role": chance.choice(roles), "content": chance.choice(content)} for _ in range(chance.randint(0, 4))]
        tool = {"name": "f", "description": "x", "input_schema": self._odd(1)}
        body = {**self._named(), "messages": chance.choice((said, said, said, self._odd(0)))}
        body |= {"tools": [tool]} if chance.random() < 0.2 else {}
        body = self._with(body, _MESSAGE_FIELDS)
        if chance.random() < 0.2:
            return Drawn("POST", "/v1/messages/count_tokens", body)
        return Drawn("POST", "/v1/messages?beta=true", {**body, "max_tokens": chance.choice((1, 2, 4))}, self._agent())

    def ollama(self) -> Drawn:
        chance = self._chance
        path = chance.choice(("chat", "chat", "generate", "generate", "embed", "embeddings", "show", "tags", "ps"))
        if path in ("tags", "ps"):
            return Drawn("GET", f"/api/{path}")
        said = {"role": chance.choice(("user", "assistant", "tool", 5)), "content": chance.choice((*WORDS, None, 5))}
        said |= {"images": chance.choice(([], ["AAAA"], self._odd(2)))} if chance.random() < 0.2 else {}
        body: dict[str, Any] = {**self._named(), "messages": [said], "prompt": chance.choice((*WORDS, 5))}
        body |= {"input": chance.choice(("a", ["a", ""], [], self._odd(1)))}
        body = self._with(body, _OLLAMA_FIELDS)
        options = {chance.choice(_OPTIONS): self._odd(2) for _ in range(chance.choice((0, 0, 1, 2)))}
        if "options" not in body:
            body["options"] = {**options, "num_predict": chance.choice((1, 2, 4))}
        return Drawn("POST", f"/api/{path}", body, self._agent())

    def vectors(self) -> Drawn:
        chance = self._chance
        texts = chance.choice(("a", "", ["a", "b"], [1, 2], [[1], [2, 3]], [2**40], [], self._odd(0)))
        body: dict[str, Any] = {**self._named(), "input": texts}
        path = chance.choice(("/v1/embeddings", "/v1/embeddings", "/v1/rerank", "/v2/rerank"))
        if path.endswith("rerank"):
            body = {**self._named(), "query": chance.choice((*WORDS, 5)), "documents": texts}
        fields = ("dimensions", "encoding_format", "user", "top_n", "return_documents", "truncate_prompt_tokens", "x")
        return Drawn("POST", path, self._with(body, fields))

    def tokens(self) -> Drawn:
        chance = self._chance
        if chance.random() < 0.5:
            tokens = chance.choice(([1, 2, 3], [], [-1], [2**40], ["a"], self._odd(0)))
            return Drawn("POST", chance.choice(("/v1/detokenize", "/detokenize")), {**self._named(), "tokens": tokens})
        body = {**self._named(), chance.choice(("prompt", "messages")): chance.choice((*WORDS, self._odd(0)))}
        fields = ("add_special_tokens", "add_generation_prompt", "return_token_strs", "tools", "chat_template_kwargs")
        return Drawn("POST", chance.choice(("/v1/tokenize", "/tokenize")), self._with(body, fields))

    def conversation(self) -> Drawn:
        chance = self._chance
        id, body = chance.choice(("conv_1", "x", "%00", "a" * 300)), {"items": [self._item()], "metadata": self._odd(1)}
        return chance.choice(
            (
                Drawn("POST", "/v1/conversations", self._with(body, ("items", "metadata"))),
                Drawn("POST", f"/v1/conversations/{id}", {"metadata": self._odd(1)}),
                Drawn("GET", f"/v1/conversations/{id}"),
                Drawn("GET", f"/v1/conversations/{id}/items?limit={chance.choice(('1', '-1', 'x'))}"),
                Drawn("DELETE", f"/v1/conversations/{id}"),
            )
        )

    def satchel(self) -> Drawn:
        """Satchels that come and go: what comes is none, or begins as one."""
        chance = self._chance
        path = f"/v1/agents/{chance.choice(('ann', 'bob', '..', '@', 'a' * 129, '%00'))}/satchel"
        if chance.random() < 0.4:
            return Drawn("GET", path)
        begins = chance.choice((b"", b"satchel", b"SATCHEL\x00\x01", b"PK\x03\x04", b"{}"))
        return Drawn("PUT", path, begins + chance.randbytes(chance.choice((0, 1, 64, 4096, 200_000))))
