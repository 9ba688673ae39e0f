"""One sequence's tokens as text: ``tokens -> characters -> pieces -> events``, a few microseconds per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ....actors.protocol.replica_messages import TokenLogprobs
from ....cluster.errors import GenerationFailed
from ...tools.answer_pieces import CallArguments, CallBegun, Piece, ReasoningDelta, ToolCall, text_of
from ...tools.call_stage import CallStage
from ...tools.formats.harmony_splitter import HarmonySplitter
from ..detokenizing import Detokenizer
from ..tokenizer import Tokenizer
from .logprobs import ShownToken, TokenLedger
from .pipeline import Pipeline
from .reasoning import ReasoningSplitter
from .stops import StopMatcher


@dataclass(frozen=True)
class TextDelta:
    """More of the answer's content.

    `logprobs` are the tokens that it completes, None if they were not requested. `text` is empty only in the last delta
    of an answer, for a token of which only a part was shown.
    """

    text: str
    logprobs: list[ShownToken] | None = None


TextEvent = TextDelta | ReasoningDelta | CallBegun | CallArguments | ToolCall


class SequenceText:
    """One sequence's text, which turns its tokens into events. No events follow once it is `stopped`.

    If a stop string or token ends an answer within a call, the call is not part of the answer, and events that were
    sent for it could not be taken back. So if the request has stop strings or tokens, a call's events come only when it
    is complete. A call that is cut by a limit has its arguments so far.

    Args:
        reasoning, stops, calls: the stages of the text's pipeline; None and () for none.
        harmony: replaces `reasoning` for models of that format; if `calls` is given, it contains this stage.
        stop_tokens: tokens that end the sequence without being text, besides the model's own end tokens.
        min_tokens: a stop string counts only if it ends in the text of a later token.
        keeps_stop: whether the stop string or token that ends the sequence stays in its text.
        special_tokens: whether special tokens except end tokens become text.
        logprobs: whether events carry logprobs; `add` needs them then.
        prelude: text that comes before that of the tokens, such as the prompt's.
        prelude_tokens: its tokens, if events carry their logprobs too; then they also carry the token that ends the
            sequence.

    Attributes:
        follows_tokens: whether events carry `logprobs`.
        tokens, reasoning_tokens: how many there were so far.
        called: whether there were calls, and the answer did not end within one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        *,
        reasoning: ReasoningSplitter | None = None,
        stops: Sequence[str] = (),
        calls: CallStage | None = None,
        harmony: HarmonySplitter | None = None,
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
        keeps_stop: bool = False,
        special_tokens: bool = False,
        logprobs: bool = False,
        prelude: str = "",
        prelude_tokens: list[ShownToken] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        ends = stop_tokens and not keeps_stop
        self._end_tokens = tokenizer.end_tokens | frozenset(stop_tokens) if ends else tokenizer.end_tokens
        self._stop_tokens = frozenset(stop_tokens) - tokenizer.end_tokens
        self._ended_by_token = False
        self._holds_calls = bool(stops or self._stop_tokens)
        self._held: list[TextEvent] = []
        self._special_tokens = special_tokens
        self._prelude, self._prelude_tokens = prelude, prelude_tokens
        self._tells_all = prelude_tokens is not None
        self._untold: list[ShownToken] = []
        self._reasoning = reasoning
        self._stops = StopMatcher(stops, keeps=keeps_stop) if stops else None
        self._min_tokens = min_tokens
        self._splitter = calls
        self._harmony = harmony
        stages = (reasoning, self._stops, calls) if harmony is None else (calls or harmony, self._stops)
        self._pipeline = Pipeline([stage for stage in stages if stage is not None])
        self._ledger = TokenLedger(tokenizer, len(prelude)) if logprobs else None
        self.follows_tokens = logprobs
        self.tokens = 0
        self.reasoning_tokens = 0
        self.called = False
        self._stopped_in_call = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, or the limit on calls was reached."""
        found = self._stops is not None and self._stops.matched
        return found or any(stage is not None and stage.full for stage in (self._splitter, self._harmony))

    @property
    def called_enough(self) -> bool:
        """Whether complete calls ended the answer."""
        return self._splitter is not None and self._splitter.limited

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return None if self._stops is None else self._stops.found

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs] | None = None) -> list[TextEvent]:
        """Takes further tokens, and returns their events.

        Raises:
            GenerationFailed: logprobs are missing.
        """
        if self._ledger is not None and len(logprobs or ()) != len(tokens):
            raise GenerationFailed("the replica sent tokens without their logprobs")
        pieces: list[Piece] = []
        for index, token in enumerate(tokens):
            if self.stopped:
                break
            self.tokens += 1
            if self._stops is not None:
                self._stops.waits = self.tokens <= self._min_tokens
            self._ended_by_token = token in self._stop_tokens
            thinking = self._thinking
            if not self._hidden(token):
                piece = self._detokenizer.add(token)
                if self._ledger is not None and logprobs is not None:
                    self._ledger.add(token, piece, logprobs[index])
                if piece:
                    pieces += self._pipeline.add(piece)
            elif self._tells_all and self._ledger is not None and logprobs is not None:
                self._untold.append(self._ledger.hidden(token, logprobs[index]))
            if thinking or self._thinking:
                self.reasoning_tokens += 1
        return [*self._begin(), *self._events(pieces)]

    def _begin(self) -> list[TextEvent]:
        """Returns the event of the prelude at the first call."""
        said, tokens = self._prelude, self._prelude_tokens or []
        self._prelude, self._prelude_tokens = "", None
        return [TextDelta(said, None if self._ledger is None else tokens)] if said or tokens else []

    def finish(self, *, cut: bool = False) -> list[TextEvent]:
        """Returns the held events, after the last token or a stop string.

        Args:
            cut: whether the answer was cut at a limit.
        """
        pieces: list[Piece] = []
        if piece := self._detokenizer.flush():
            if self._ledger is not None:
                self._ledger.settle(piece)
            pieces += self._pipeline.add(piece)
        if self._splitter is not None:
            stopped = not cut and (self._ended_by_token or self.stop_string is not None)
            self._splitter.end(cut=cut or stopped)
            self._stopped_in_call = stopped and self._splitter.in_call
            self.called = self.called and not self._stopped_in_call
        events = [*self._begin(), *self._events([*pieces, *self._pipeline.flush()])]
        if self._ledger is not None and (rest := [*self._ledger.finish(), *self._untold]):
            last = events[-1] if events else None
            if isinstance(last, TextDelta):
                events[-1] = TextDelta(last.text, [*(last.logprobs or ()), *rest])
            else:
                events.append(TextDelta("", rest))
        return events

    @property
    def _thinking(self) -> bool:
        return any(stage is not None and stage.inside for stage in (self._reasoning, self._harmony))

    def _hidden(self, token: int) -> bool:
        if token in self._end_tokens:
            return True
        if self._special_tokens or token not in self._tokenizer.hidden_tokens:
            return False
        if self._harmony is not None:
            return token not in self._tokenizer.harmony_tokens
        # Some models write their markers, and a call's name and arguments, as special tokens.
        if self._reasoning is not None and not self._reasoning.over and token in self._tokenizer.think_tokens:
            return False
        return self._splitter is None or not (self._splitter.inside or token in self._tokenizer.call_tokens)

    def _events(self, pieces: list[Piece]) -> list[TextEvent]:
        """Merges neighbouring pieces of a kind into one event, with their tokens."""
        events: list[TextEvent] = []
        for kind, run in groupby(pieces, type):
            if kind in (CallBegun, CallArguments, ToolCall):
                for piece in run:
                    if isinstance(piece, CallBegun | CallArguments | ToolCall):
                        events += self._of_call(piece)
                continue
            text = "".join(text_of(piece) for piece in run)
            if kind is str:
                events.append(TextDelta(text, None if self._ledger is None else self._ledger.show(text)))
                continue
            if self._ledger is not None:
                self._ledger.skip(text)
            if kind is ReasoningDelta:
                events.append(ReasoningDelta(text))
        return events

    def _of_call(self, piece: CallBegun | CallArguments | ToolCall) -> list[TextEvent]:
        """Returns the events of a piece of a call."""
        if isinstance(piece, ToolCall):
            self.called = piece.given is not None
            if not self.called and self._stopped_in_call:
                return []
        self._held.append(piece)
        if self._holds_calls and not isinstance(piece, ToolCall):
            return []
        told, self._held = self._held, []
        return told
