"""What a decode step returns: the sequences' next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....protocol.replica_messages import TokenLogprobs
from .sampling import Draw


class Ready(NamedTuple):
    """A sequence's next token; `logprobs` if the sequence asked for them. If not `sound`, its logit was not a finite
    number; if there is a `grammar_error`, the sequence's grammar could not be followed. The token is meaningless in
    both cases."""

    sequence_id: str
    token: int
    sound: bool = True
    logprobs: TokenLogprobs | None = None
    grammar_error: str = ""

    @property
    def failure(self) -> str:
        """Why the token is meaningless; empty if it is valid."""
        return self.grammar_error if self.sound else "the model's output is not a number"


def read(draw: Draw, sequence_ids: Sequence[str | None]) -> dict[str, tuple[bool, TokenLogprobs | None]]:
    """Returns by sequence whether its token is sound, and its logprobs; waits for the device."""
    sound: list[bool] = draw.sound.tolist()  # type: ignore[assignment]
    read = zip(sequence_ids, zip(sound, draw.logprobs(), strict=True), strict=True)
    return {sequence_id: each for sequence_id, each in read if sequence_id is not None}
