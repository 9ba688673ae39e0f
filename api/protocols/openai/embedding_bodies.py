"""OpenAI's embeddings, and Jina's and Cohere's rankings, on the way in: request bodies."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ....cluster.config.config import Endpoint
from ....cluster.errors import InvalidRequest
from ...pipeline.vectors import TEXTS_MAX, EmbeddingRequest, RankingRequest
from ...requests.options import WHOLE, Priority, TimeoutS, make_options
from ...requests.request_body import RequestBody
from .bodies import KeptTokens, PromptBody
from .unsupported import refuse_unsupported

_UNDONE = MappingProxyType(
    {
        "messages": (),
        "input_type": (),
        "normalize": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
    }
)
_UNDONE_RANKING = MappingProxyType(
    {
        "rank_fields": (),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "return_embeddings": (False,),
        "instruction": (),
    }
)


class VectorBody(RequestBody):
    """The fields of embeddings and rankings. `null` means the default."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None

    def check(self) -> None:
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens: must be at least 1, or -1 for as many as fit"
            raise InvalidRequest(message, param="truncate_prompt_tokens")

    @property
    def _common(self) -> dict[str, Any]:
        return {
            "model": self.model or "",
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "options": make_options(priority=self.priority, timeout_s=self.timeout_s),
        }


class EmbeddingBody(VectorBody):
    """The body of `/v1/embeddings`."""

    input: PromptBody
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    add_special_tokens: bool | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        refuse_unsupported(fields, _UNDONE)
        _refuse_many(fields, "input")

    def request(self) -> EmbeddingRequest:
        special = self.add_special_tokens is not False
        return EmbeddingRequest(self.input, self.dimensions, special, **self._common)


class DocumentBody(RequestBody):
    """A document as an object; its other fields are ignored."""

    text: str


def _document_tag(given: Any) -> str | None:
    return "<text>" if isinstance(given, str) else "<object>" if isinstance(given, dict | DocumentBody) else None


Document = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[DocumentBody, Tag("<object>")],
    Discriminator(
        _document_tag,
        custom_error_type="document",
        custom_error_message="must be a string, or an object with a text",
    ),
]


class RankingBody(VectorBody):
    """The body of `/v1/rerank`, `/rerank` and `/v2/rerank`."""

    query: str
    documents: list[Document]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    return_documents: bool | None = None

    @classmethod
    def check_fields(cls, fields: dict[str, Any], values: int, limits: Endpoint) -> None:
        # Only Cohere's route has this name; other routes refuse it.
        refuse_unsupported({name: value for name, value in fields.items() if name != "documents"}, _UNDONE_RANKING)
        _refuse_many(fields, "documents")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def request(self) -> RankingRequest:
        return RankingRequest(self.query, self.texts, self.top_n, **self._common)


def _refuse_many(fields: dict[str, Any], name: str) -> None:
    """Refuses too many texts before each is validated; a list of numbers is one text."""
    given = fields.get(name)
    if isinstance(given, list) and len(given) > TEXTS_MAX and not isinstance(given[0], int):
        raise InvalidRequest(f"{name} has {len(given)} entries; at most {TEXTS_MAX} go into one request", param=name)
