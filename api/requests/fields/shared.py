"""Fields that the bodies of all protocols share: sampling, an answer's form, and how a model thinks."""

from __future__ import annotations

from typing import Any, ClassVar

from ...text.answers.grammars import AnswerForm
from ..field_aliases import FORMS, SWITCHES
from ..options import (
    AllowedTokenIds,
    BadWords,
    LogitBias,
    MinP,
    MinTokens,
    Options,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    Temperature,
    TimeoutS,
    TopK,
    TopP,
    make_options,
)
from ..request_body import RequestBody
from .forms import Forms, read_form
from .thinking import Thinking, read_thinking

_ELSEWHERE = ("max_tokens", "logprobs")
"""Options for which every protocol has its own field."""


class FormBody(RequestBody):
    """A body that may set the answer's form; `own_forms` are the protocol's own names of the fields for it."""

    beside = FORMS

    own_forms: ClassVar[tuple[str, ...]] = ()

    @property
    def forms(self) -> Forms:
        """The form that the answer must have, and which fields ask for another one.

        Raises:
            InvalidRequest: as `read_form`.
        """
        return read_form(self._beside, self.own_forms)

    @property
    def form(self) -> AnswerForm | None:
        """The form that the answer's content must have. Raises as `forms`."""
        return self.forms.form

    @property
    def ignored(self) -> list[str]:
        return [*super().ignored, *self.forms.ignored]


class ThinkingBody(RequestBody):
    """A body of a conversation; `own_switches` are the protocol's own names of the fields that set how the model
    thinks."""

    beside = SWITCHES

    own_switches: ClassVar[tuple[str, ...]] = ()

    @property
    def thinking_said(self) -> Thinking:
        """How the model thinks, and which fields contradict that.

        Raises:
            InvalidRequest: as `read_thinking`.
        """
        return read_thinking(self._beside, self.own_switches)

    @property
    def ignored(self) -> list[str]:
        return [*super().ignored, *self.thinking_said.ignored]


class ChatFieldsBody(FormBody, ThinkingBody):
    """A body that may set the answer's form and how the model thinks."""

    beside = (*FORMS, *SWITCHES)


class SamplingBody(RequestBody):
    """A body with fields for sampling."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    min_tokens: MinTokens | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    timeout_s: TimeoutS | None = None

    def drawing(self, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> Options:
        """Returns the options of an answer; `more` are options that the body has under other names."""
        same = {
            name: value
            for name in Options.__dataclass_fields__
            if name not in _ELSEWHERE and (value := getattr(self, name, None)) is not None
        }
        return make_options(**(same | more), max_tokens=max_tokens, logprobs=logprobs)


class AgentBody(SamplingBody):
    """A body whose answer may be kept in an agent's memory.

    Attributes:
        agent_continue: whether it continues its agent's transcript.
    """

    agent_id: str | None = None
    agent_continue: bool | None = None
