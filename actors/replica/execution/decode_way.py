"""How decode steps read sealed blocks. `loading/ways/decode_ways.py` finds out which way is the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kv.paged_cache import Reads

TENSOR = "with tensor cores"


@dataclass(frozen=True)
class DecodeWay:
    """How decode steps read sealed blocks.

    Attributes:
        compiled: whether steps are recorded (`recorded/compiled_step.py`).
        fused: whether recorded steps leave norms and rotations to the kernel (`recorded/deferral.py`).
        summed: whether recorded steps compute residual sums with what is beside them (`recorded/residual_sums.py`).
        gated: whether products compute what comes after them in recorded steps: gates, and sums if `summed`
            (`recorded/fused_products.py`).
        tensor: whether tensor cores read sealed blocks (`kernels/decode_tensor.py`).
        drafts: whether recorded steps may have several tokens of a sequence.
        alike: up to how many tokens a recorded step's logits have the same bits as those of each token alone, so that
            drafts change no answer; 0 if they have not, or if that is not known.
        reason: why no faster way is used; empty if it is the fastest of this device, or was asked for.
    """

    reads: Reads
    compiled: bool = False
    fused: bool = False
    reason: str = ""
    drafts: bool = True
    summed: bool = False
    tensor: bool = False
    gated: bool = False
    alike: int = 0

    @property
    def is_fallback(self) -> bool:
        """Whether a faster way of this device failed its test."""
        return self.reads is Reads.DEQUANTIZED and bool(self.reason)

    def describe(self) -> str:
        """Returns it as text, such as `by a kernel, compiled`."""
        more = ["compiled"] * self.compiled + ["with norms and rotations"] * self.fused + ["with sums"] * self.summed
        more += ["with gates"] * self.gated + [TENSOR] * self.tensor
        more += [f"the same bits in steps of {self.alike} tokens"] * bool(self.alike)
        way = ", ".join([self.reads.value, *more])
        return f"{way} ({self.reason})" if self.reason else way


@dataclass(frozen=True)
class Trial:
    """A way that was tried on this device.

    Attributes:
        way: in words, such as `by a kernel`.
        off: how far its logits were from the reference's, relative to their scale; None if it computed none.
        reason: why it is not used; empty if it agreed.
        reference_s, step_s: the shortest times of the reference's steps and of its own, in seconds; None if not timed.
    """

    way: str
    off: float | None = None
    reason: str = ""
    reference_s: float | None = None
    step_s: float | None = None


Tried = Callable[[Trial], None]
"""Is told each way that was tried."""


def nobody(trial: Trial) -> None:
    """Ignores a trial."""


DEQUANTIZED = DecodeWay(Reads.DEQUANTIZED)
"""Decode steps read blocks as prefill does, so both give equal results to the last bit."""
