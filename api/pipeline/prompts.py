"""The prompts of a text completion: encoded, wrapped for fill-in-the-middle, truncated and checked. Call it in a worker
thread."""

from __future__ import annotations

from typing import cast

from ...cluster.errors import InvalidRequest
from ..requests.backend import ServedModel
from ..requests.requests import CompletionRequest, PreparedPrompt, check_least, check_length, kept_tokens
from ..text.callers_text import CallersText
from ..text.control_tokens import refuse_breaks
from ..text.model import TextModel


def prepare_completion(
    text: TextModel, model: ServedModel, request: CompletionRequest, prompts_max: int
) -> list[PreparedPrompt]:
    """Encodes the prompts of a completion.

    Raises:
        InvalidRequest: there are none or more than `prompts_max`, one is empty, a token id is not in the vocabulary, or
            the model has no tokens for a `suffix`.
        ContextLengthExceeded: one does not fit.
    """
    prompts: list[PreparedPrompt] = []
    bad_words = text.tokenizer.word_tokens(request.options.bad_words)
    for where, prompt in entries(request.prompt, "prompt", prompts_max):
        tokens = _encoded(text, model, request, prompt, where) if isinstance(prompt, str) else prompt
        check_vocabulary(tokens, model.info.vocabulary_size, where)
        if not tokens:
            raise InvalidRequest(f"{where} is empty", param="prompt")
        if request.suffix and not isinstance(prompt, str):
            raise InvalidRequest("suffix: only possible with a prompt that is text", param="suffix")
        tokens = kept_tokens(tokens, model, request)
        check_length(tokens, model, where)
        said = ""
        if request.echo:
            uncut = request.truncate_prompt_tokens is None
            said = prompt if uncut and isinstance(prompt, str) else text.tokenizer.decode(tokens)
        prompts.append(
            PreparedPrompt(
                request=request, model=model, text_model=text, prompt=tokens, prelude=said, bad_words=bad_words
            )
        )
    return prompts


def entries(
    given: str | list[str] | list[int] | list[list[int]], field: str, most: int
) -> list[tuple[str, str | list[int]]]:
    """Returns the texts, or token ids, of a field that has one or several, each with its place for errors.

    Raises:
        InvalidRequest: there are more than `most`.
    """
    several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    texts = cast(list[str | list[int]], given if several else [given])
    if len(texts) > most:
        raise InvalidRequest(f"{field} has {len(texts)} entries; at most {most} go into one request", param=field)
    return [(f"{field}[{index}]" if several else field, each) for index, each in enumerate(texts)]


def _encoded(text: TextModel, model: ServedModel, request: CompletionRequest, prompt: str, where: str) -> list[int]:
    check_least(text, prompt + request.suffix, model, where, cut=request.truncate_prompt_tokens is not None)
    if not request.suffix:
        # A completion's prompt is used as it is: its markers become tokens.
        return text.recent.encode(refuse_breaks(prompt), request.scope, special_tokens=request.special_tokens)
    if (marks := text.tokenizer.infill_marks) is None:
        message = f"suffix: the model {model.info.name!r} has no fill-in-the-middle tokens"
        raise InvalidRequest(message, param="suffix")
    first = text.tokenizer.begin_tokens if request.special_tokens else []
    guard = CallersText(text.tokenizer, as_tokens=model.marks_are_tokens)
    before, after = guard.text(prompt), guard.text(request.suffix)
    return [*first, *marks.prompt(text.tokenizer.encode(before), text.tokenizer.encode(after))]


def text_tokens(text: TextModel, model: ServedModel, request: CompletionRequest) -> list[int]:
    """Returns the tokens of a prompt that is a single text. It may be empty, or a few times as long as the context.

    Raises:
        ContextLengthExceeded: it is several times as long.
    """
    assert isinstance(request.prompt, str)
    check_least(text, request.prompt, model, "prompt", cut=True)
    return text.recent.encode(refuse_breaks(request.prompt), request.scope, special_tokens=request.special_tokens)


def check_vocabulary(tokens: list[int], size: int, where: str) -> None:
    """Checks token ids.

    Raises:
        InvalidRequest: one is not in the model's vocabulary.
    """
    if tokens and (min(tokens) < 0 or max(tokens) >= size):
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < size)
        where = f"{where}[{index}]"
        raise InvalidRequest(f"{where} is {tokens[index]}; the model has token ids 0 to {size - 1}", param=where)
