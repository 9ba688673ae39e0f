"""Generation options: every field that a caller may set, its limits and its default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated

from ...actors.protocol.replica_messages import Sampling, ThinkingBudget
from ...cluster.errors import InvalidRequest, quoted

CHOICES_MAX = 16
TOP_LOGPROBS_MAX = 20

_STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 1024
_STOP_TOKENS_MAX = 64
_ALLOWED_TOKENS_MAX = 1024
_BAD_WORDS_MAX = 64
_BAD_WORD_CHARACTERS_MAX = 128
_BIASES_MAX = 1024
_BIAS_MAX = 100
_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

# Below this, dividing logits by the temperature overflows; the limit is greedy sampling.
_GREEDY_BELOW = 1e-5


def whole(value: Any) -> Any:
    """Returns a whole number as an integer, because some languages write every JSON number with a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(whole)


def _stop_strings(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > _STOPS_MAX:
        raise ValueError(f"has {len(stops)} strings; at most {_STOPS_MAX} are possible")
    if not all(0 < len(stop) <= _STOP_CHARACTERS_MAX for stop in stops):
        raise ValueError(f"every stop string must have 1 to {_STOP_CHARACTERS_MAX} characters")
    return tuple(stops)


def _token_ids(value: Any, most: int = _STOP_TOKENS_MAX) -> Any:
    tokens = tuple(map(whole, value)) if isinstance(value, list | tuple) else ("",)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError("must be a list of token ids")
    if len(tokens) > most:
        raise ValueError(f"has {len(tokens)} token ids; at most {most} are possible")
    return tokens


def _allowed(value: Any) -> Any:
    if isinstance(value, list) and not value:
        raise ValueError("has no token ids, so that nothing could be drawn")
    return _token_ids(value, _ALLOWED_TOKENS_MAX)


def _words(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
        raise ValueError("must be a list of strings")
    if len(value) > _BAD_WORDS_MAX:
        raise ValueError(f"has {len(value)} words; at most {_BAD_WORDS_MAX} are possible")
    if not all(word.strip() and len(word) <= _BAD_WORD_CHARACTERS_MAX for word in value):
        raise ValueError(f"every word must have 1 to {_BAD_WORD_CHARACTERS_MAX} characters, not only spaces")
    return tuple(value)


def _biases(value: Any) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else value if isinstance(value, tuple) else None
    if pairs is None:
        raise ValueError("must be an object of token ids and numbers")
    if len(pairs) > _BIASES_MAX:
        raise ValueError(f"has {len(pairs)} tokens; at most {_BIASES_MAX} are possible")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        # JSON's keys are strings; Python callers write numbers.
        if type(key) is not int and not (isinstance(key, str) and _TOKEN.fullmatch(key)):
            raise ValueError(f"{quoted(key)} is no token id")
        if type(bias) not in (int, float) or not -_BIAS_MAX <= bias <= _BIAS_MAX:
            raise ValueError(f"the bias of token {key} must be a number from -{_BIAS_MAX} to {_BIAS_MAX}")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


_Int64 = Field(ge=-(2**63), le=2**63 - 1)
Temperature = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
TopP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
LogitBias = Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases, json_schema_input_type=dict[str, float])]
Seed = Annotated[int, _Int64, WHOLE]
Priority = Annotated[int, _Int64, WHOLE]
MaxTokens = Annotated[int, Field(ge=1, le=2**63 - 1), WHOLE]
MinTokens = Annotated[int, Field(ge=0, le=2**63 - 1), WHOLE]
Stop = Annotated[tuple[str, ...], BeforeValidator(_stop_strings, json_schema_input_type=str | list[str])]
StopTokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids, json_schema_input_type=list[int])]
AllowedTokenIds = Annotated[tuple[int, ...], BeforeValidator(_allowed, json_schema_input_type=list[int])]
BadWords = Annotated[tuple[str, ...], BeforeValidator(_words, json_schema_input_type=list[str])]
TopLogprobs = Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX), WHOLE]
Choices = Annotated[int, Field(ge=1, le=CHOICES_MAX), WHOLE]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
TimeoutS = Annotated[float, Field(ge=0.001, le=1e9, allow_inf_nan=False)]

_SILENT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The values if neither the caller nor the model sets them."""


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Options:
    """Generation options. Numbers out of range raise pydantic's `ValidationError`; `make_options` raises
    `InvalidRequest`.

    `Sampling` explains the fields. If `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty` is None, the
    model's generation config sets it; without one it is off (`temperature` 1). `top_k` 0 or -1 is off. With
    `temperature` 0 or `top_p` 0 the likeliest token is taken. `logit_bias` is a mapping from token ids, as numbers or
    decimal strings.

    Without `seed` every prompt gets a random one. Without `max_tokens` a sequence may fill the context, within
    `scheduling.max_tokens_max`; a larger value is cut to what is left of the context. `stop` strings end the answer if
    they occur in its content; reasoning is not searched. With `include_stop_str_in_output` the one that is found stays
    in the answer, as do `stop_token_ids`; special tokens become text with `skip_special_tokens` False. `bad_words` do
    not appear in the answer, at the beginning of a word or without a space before. `timeout_s` counts from the
    request's arrival to its last token, at most `timeouts.request_s`.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = ()
    seed: Seed | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: MinTokens = 0
    stop: Stop = ()
    stop_token_ids: StopTokenIds = ()
    allowed_token_ids: AllowedTokenIds = ()
    bad_words: BadWords = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: TopLogprobs | None = None
    priority: Priority = 0
    timeout_s: TimeoutS | None = None

    def sampling(
        self,
        own: Mapping[str, float],
        *,
        seed: int,
        max_tokens: int,
        vocabulary_size: int,
        choice: int = 0,
        grammar: str = "",
        bad_words: Sequence[list[int]] = (),
        thinking: ThinkingBudget | None = None,
    ) -> Sampling:
        """Resolves all defaults for one sequence.

        Args:
            own: the sampling options of the model's generation config, by field.
            max_tokens: how many the sequence may generate.
            grammar: what constrains the answer, "" for nothing.
            bad_words: the token ids of the words that must not appear.
            thinking: limits reasoning; None for no limit.
        """
        chosen: dict[str, Any] = {
            name: own.get(name, silent) if getattr(self, name) is None else getattr(self, name)
            for name, silent in _SILENT.items()
        }
        if chosen["temperature"] < _GREEDY_BELOW or chosen["top_p"] == 0:
            chosen |= {"temperature": 0.0, "top_p": chosen["top_p"] or 1.0}
        chosen["top_k"] = min(max(int(chosen["top_k"]), 0), vocabulary_size)
        return Sampling(
            **chosen,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=list(self.logit_bias),
            seed=seed,
            choice=choice,
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stop_token_ids),
            logprobs=self.logprobs,
            grammar=grammar,
            allowed_token_ids=list(self.allowed_token_ids),
            bad_words=list(bad_words),
            thinking=thinking,
        )

    def check_tokens(self, vocabulary_size: int) -> None:
        """Checks the token ids.

        Raises:
            InvalidRequest: one is not in the model's vocabulary.
        """
        for name, tokens in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < vocabulary_size:
                    raise InvalidRequest(
                        f"{name} has token id {token}; the model has token ids 0 to {vocabulary_size - 1}", param=name
                    )


class GenerationOptions(TypedDict, total=False):
    """The fields of `Options` as keyword arguments; None means the default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    priority: int | None
    timeout_s: float | None


def make_options(**fields: Any) -> Options:
    """Makes `Options` from fields; None means the default.

    Raises:
        InvalidRequest: a field is out of range or unknown; `param` is the field.
    """
    try:
        options = Options(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid(error) from None
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidRequest("min_tokens is more than max_tokens", param="min_tokens")
    return options


def invalid(error: ValidationError, named: Mapping[str, str] = MappingProxyType({})) -> InvalidRequest:
    """Converts pydantic's first error to an `InvalidRequest`, with the place as `param`.

    Args:
        named: the caller's names of fields that it sent under other names.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    for length in (2, 1):
        own = ".".join(map(str, place[:length]))
        if own in named:
            place = (named[own], *place[length:])
            break
    return invalid_at(place, first["msg"])


def invalid_at(place: Sequence[int | str], complaint: str) -> InvalidRequest:
    """Makes an `InvalidRequest` of one pydantic error."""
    where, message = position(place), complaint.removeprefix("Value error, ")
    return InvalidRequest(f"{where}: {message}" if where else message, param=where or None)


def position(steps: Sequence[int | str]) -> str:
    """Returns a place in a body as a caller would write it, such as `messages[2].content`. Steps in `<>`, the names of
    a union's members, are left out."""
    where = ""
    for step in steps:
        if isinstance(step, int):
            where += f"[{step}]"
        elif not step.startswith("<"):
            where += f".{step}" if where else step
    return where
