"""Options that several benchmarks read in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def names_among(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns what reads known names, as `decoding,prefill`, in their order; for an option's `type`."""

    def read(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return chosen

    return read
