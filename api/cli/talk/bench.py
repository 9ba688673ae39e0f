"""`satchel bench`: measures the running server with prompts and answers of the lengths that agents have."""

from __future__ import annotations

import json as json_text
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any, Optional

import httpx
import typer

from ....cluster.errors import ConfigError, SatchelError
from ..completing import complete_model
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json
from ..views import client, error_of, named_model

_SILENCE_S_MAX = 600.0
_STREAMS_MAX = 64
_FURTHER_TOKENS = 200
"""How much longer the prompt of the next turn is."""

_TEXT = (
    "An agent reads files, runs programs, looks at what they print and changes a line here and there. Its prompt grows "
    "with every turn: def main(arguments: list[str]) -> int: return 0 if check(arguments) else 1  # 42 tests passed. "
)


def bench(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--model", metavar="NAME", help="The model (else the first).", autocompletion=complete_model),
    ] = None,
    streams: Annotated[
        str, typer.Option("--streams", metavar="N,N…", help="How many requests run at a time, one measurement each.")
    ] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option("--prompt", min=1, metavar="TOKENS", help="Of a first turn.")] = 1500,
    tokens: Annotated[int, typer.Option("--tokens", min=2, metavar="TOKENS", help="Of each answer.")] = 128,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Measure times to the first token and tokens a second of the running server. Other requests slow it down."""
    counts = _counts(streams)
    with client(chosen_home(home), timeout_s=_SILENCE_S_MAX) as session:
        asking = _Asking(session, named_model(session, model)["id"], prompt_tokens, tokens)
        # Not measured: a first request may compile kernels.
        print("Warming up", file=sys.stderr, flush=True)
        asking.turns(1)
        found = []
        for count in counts:
            print(f"Measuring {count} at a time", file=sys.stderr, flush=True)
            found.append(asking.turns(count))
    if json:
        lengths = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        results = [asdict(each) for each in found]
        print_json({"model": asking.model, **lengths, "results": results})
        return
    from rich.console import Console

    from ..tables import table

    print(f"{asking.model}: prompts of {prompt_tokens:,} tokens, answers of {tokens}")
    shown = table(numbers=("streams", "first token", "slowest", "tokens/s", "next turn's first token"))
    for each in found:
        times = (each.first_token_s, each.first_token_s_max, each.next_first_token_s)
        first, slowest, following = (_time(seconds) for seconds in times)
        shown.add_row(str(each.streams), first, slowest, f"{each.tokens_per_s:,.0f}", following)
    Console(highlight=False).print(shown)


@dataclass(frozen=True)
class Measured:
    """A measurement.

    Attributes:
        streams: requests at a time.
        first_token_s, first_token_s_max: from sending a new prompt to the first token, the median and the longest.
        tokens_per_s: of all streams together, from sending the prompts to the last token.
        next_first_token_s: the median for the same prompt with 200 more tokens, most of whose KV is in memory.
    """

    streams: int
    first_token_s: float
    first_token_s_max: float
    tokens_per_s: float
    next_first_token_s: float


class _Asking:
    """Sends prompts of exact lengths, as token ids. Each prompt is new."""

    def __init__(self, session: httpx.Client, model: str, prompt_tokens: int, tokens: int) -> None:
        self.model = model
        self._session, self._prompt_tokens, self._tokens = session, prompt_tokens, tokens
        answer = session.post("/v1/tokenize", json={"model": model, "prompt": _TEXT, "add_special_tokens": False})
        if not answer.is_success:
            raise error_of(answer)
        self._words: list[int] = answer.json()["tokens"]

    def turns(self, streams: int) -> Measured:
        """Measures a first turn and a next one, with so many requests at a time."""
        prompts = [random.choices(self._words, k=self._prompt_tokens) for _ in range(streams)]
        with ThreadPoolExecutor(streams) as threads:
            began = time.monotonic()
            firsts = list(threads.map(self._first_token_s, prompts))
            took = time.monotonic() - began
            longer = [[*prompt, *random.choices(self._words, k=_FURTHER_TOKENS)] for prompt in prompts]
            nexts = list(threads.map(self._first_token_s, longer))
        return Measured(streams, median(firsts), max(firsts), streams * self._tokens / took, median(nexts))

    def _first_token_s(self, prompt: list[int]) -> float:
        """Runs a request to its end, and returns the seconds to its first token.

        Raises:
            SatchelError: it failed.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": self._tokens, "stream": True}
        began, first = time.monotonic(), None
        with self._session.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
            if not response.is_success:
                response.read()
                raise error_of(response)
            for line in response.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                chunk = json_text.loads(line.removeprefix("data:"))
                if "error" in chunk:
                    raise SatchelError(f"the endpoint failed: {chunk['error'].get('message', 'no reason given')}")
                first = time.monotonic() if first is None else first
        if first is None:
            raise SatchelError("the endpoint sent no token")
        return first - began


def _counts(text: str) -> list[int]:
    """
    Raises:
        ConfigError: the text is no list of numbers of streams.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= _STREAMS_MAX for part in parts):
        raise ConfigError(f"--streams {text}: must be numbers from 1 to {_STREAMS_MAX} with commas, such as 1,4,16")
    return [int(part) for part in parts]


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
