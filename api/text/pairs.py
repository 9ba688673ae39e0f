"""How a model that scores pairs gets a query and a document.

Either its chat template has places for both, as messages of the roles `query` and `document`; or it is a
Qwen3-Reranker, whose model card gives the form (Zhang et al., "Qwen3 Embedding", 2025). The score is the difference of
the logits of two answers, yes and no.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ...actors.model_files.sentence_modules import SentenceModules
from ...cluster.errors import InvalidRequest
from .templates.template import Template
from .tokenizer import Tokenizer

_RERANKER = re.compile(r"qwen3[-_. ]?(vl[-_. ]?)?reranker", re.IGNORECASE)
_QUERY, _DOCUMENT = "what is asked for", "what may answer it"
_ROLES = (re.compile(r"""['"]query['"]"""), re.compile(r"""['"]document['"]"""))
_ANSWERS = ("yes", "no")

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_FORM = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True)
class PairForm:
    """How a model scores a pair: `render` makes its prompt of query and document, and `score` are the token ids of the
    answers, as in `PoolingRequest`."""

    render: Callable[[str, str], str]
    score: tuple[int, ...]


def pair_form(tokenizer: Tokenizer, template: Template, sentences: SentenceModules, names: str) -> PairForm | None:
    """Returns how a model scores pairs; None if it does not.

    Args:
        names: the model's names.

    Raises:
        InvalidRequest: it does, but it is not known how it gets a query and a document.
    """
    answers = tuple(token for token in map(tokenizer.token_of, _ANSWERS) if token is not None)
    named = _RERANKER.search(names) is not None
    templated = _has_places(template)
    score = sentences.score or (answers if len(answers) == len(_ANSWERS) and (named or templated) else ())
    if not score:
        return None
    instruction = sentences.default_prompt
    if templated:
        return PairForm(lambda query, document: _templated(template, sentences, instruction, query, document), score)
    if named or score == answers:
        told = instruction or _INSTRUCTION
        return PairForm(lambda query, document: _FORM.format(instruction=told, query=query, document=document), score)
    message = (
        f"the model {tokenizer.name!r} scores pairs, but its chat template has no place for a query and a document"
    )
    raise InvalidRequest(message, param="model")


def _has_places(template: Template) -> bool:
    """Returns whether the chat template shows messages of both roles. It must name them, because most templates show
    any role."""
    if not all(role.search(template.source) for role in _ROLES):
        return False
    try:
        shown = _templated(template, SentenceModules(), "", _QUERY, _DOCUMENT)
    except InvalidRequest:
        return False
    return _QUERY in shown and _DOCUMENT in shown


def _templated(template: Template, sentences: SentenceModules, instruction: str, query: str, document: str) -> str:
    said = [{"role": "system", "content": instruction}] if instruction else []
    said += [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return template.render(said, generation_prompt=sentences.generation_prompt)
