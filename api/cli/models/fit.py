"""`satchel fit`: what a model needs, and how it fits on each node, from the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ....actors.model_files.source import headers_of, resolve
from ....cluster.config.units import bytes_of
from ....cluster.connection import find_cluster
from ....cluster.errors import ConfigError, NotRunning
from ....cluster.home import Home
from ..options import KV, HomeOption, JsonOption, chosen_home
from ..printing import print_json
from ..tables import size
from .choosing import source_of
from .disk import complete_source, hub_models, precision_of

if TYPE_CHECKING:
    from ....actors.replica.estimate import Fit, ModelEstimate

_ANSWER_S = 15.0


def fit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hub id (owner/name or owner/name@revision), a folder, embedded:NAME.",
            autocompletion=complete_source,
        ),
    ],
    kv: Annotated[KV, typer.Option("--kv", help="The format of cached KV; auto counts with q4.")] = KV.auto,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--memory", metavar="SIZE", help="A machine whose replicas may use this much, such as 48GB."),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Say what a model needs, and how many agents fit on each node. Reads only headers; exit code 1 if it fits nowhere.

    The nodes are those of the running server, or this machine.
    """
    needs = estimated(model, kv)
    nodes = [_given(needs, memory)] if memory is not None else list(_nodes(needs, chosen_home(home)))
    if json:
        print_json(_described(model, needs, nodes))
    else:
        _show(model, needs, nodes)
    if not any(node.fit.context_tokens for node in nodes):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _OnNode:
    """How a model fits on a node, and the recipe of `satchel convert` that would make it fit, if it does not."""

    name: str
    memory_bytes: int
    fit: Fit
    recipe: str | None


def estimated(model: str, kv: KV = KV.auto) -> ModelEstimate:
    """Returns what a model needs.

    Raises:
        ConfigError: it is no source.
        ModelLoadError: it cannot be served, or the Hub does not answer.
    """
    source, _ = source_of(model)
    # MLX takes seconds to import.
    from ....actors.replica.estimate import estimate

    cached = next((each.folder for each in hub_models() if each.source == source and each.complete), None)
    folder = cached if "/" in source and cached is not None else None
    if folder is None and (source.startswith("embedded:") or Path(source).is_dir()):
        folder = resolve(source, lambda what, done: None)
    if folder is not None:
        return estimate(model, folder, kv.value)
    with headers_of(source) as folder:
        return estimate(model, folder, kv.value)


def here() -> int:
    """Returns the bytes that this machine's replicas may use, if none runs."""
    from ....actors.replica.memory.claims import node_bytes

    return node_bytes()


def _given(needs: ModelEstimate, memory: str) -> _OnNode:
    try:
        given = bytes_of(memory)
    except ValueError as error:
        raise ConfigError(f"--memory {memory}: {error}") from None
    return _on(f"with {size(given)}", needs, given)


def _on(name: str, needs: ModelEstimate, memory_bytes: int, beside: int = 0) -> _OnNode:
    """
    Args:
        memory_bytes: what the node's replicas may use, beside what others need for their weights.
        beside: the number of other replicas.
    """
    from ....actors.replica.memory.budget import MemoryClaim

    others = [MemoryClaim(0, 0)] * beside
    found = needs.in_memory(memory_bytes, others)
    short = found.context_tokens < min(needs.context_tokens, 8_000)
    return _OnNode(name, memory_bytes, found, needs.fitting_recipe(memory_bytes, others) if short else None)


def _nodes(needs: ModelEstimate, home: Home) -> Iterator[_OnNode]:
    """Yields the nodes of the running server, or this machine if none runs.

    A node's memory for KV is that of its replicas together: a further model takes its weights from it, and then all
    replicas have equal parts.
    """
    from ..views import client, get_json

    try:
        find_cluster(home)
    except NotRunning:
        yield _on("this machine", needs, here())
        return
    with client(home, timeout_s=_ANSWER_S) as session:
        view = get_json(session, "/v1/cluster?agents=0")
    for node in view["nodes"]:
        replicas = [each for each in view["replicas"] if each["node"] == node["name"] and each["memory_bytes_max"]]
        if replicas:
            yield _on(node["name"], needs, sum(each["memory_bytes_max"] for each in replicas), len(replicas))
        else:
            yield _on(node["name"], needs, node["memory_free_bytes"] or 0)


def _described(model: str, needs: ModelEstimate, nodes: list[_OnNode]) -> dict[str, Any]:
    return {
        "source": model,
        "weights_bytes": needs.weights_bytes,
        "weights": precision_of(needs.config) or None,
        "layers": needs.spec.describe(),
        "kv": needs.kv,
        "kv_bytes_per_1000_tokens": 1000 * needs.spec.bytes_per_token,
        "bytes_per_sequence": needs.spec.bytes_per_sequence,
        "context_tokens": needs.context_tokens,
        "recipes": needs.recipes,
        "nodes": [{"name": node.name, "memory_bytes": node.memory_bytes, **asdict(node.fit)} for node in nodes],
    }


def _show(model: str, needs: ModelEstimate, nodes: list[_OnNode]) -> None:
    from rich.console import Console
    from rich.text import Text

    from ..tables import table

    console = Console(markup=False, highlight=False)
    kept = precision_of(needs.config)
    if kept and kept != needs.dtype and needs.dtype == "float32":
        kept = f"{kept}, computed in float32"
    own = f" and {size(needs.spec.bytes_per_sequence)} a sequence" if needs.spec.bytes_per_sequence else ""
    console.print(f"{model}: {size(needs.weights_bytes)} of weights{f' ({kept})' if kept else ''}")
    console.print(f"KV: {size(1000 * needs.spec.bytes_per_token)} for 1,000 tokens{own} ({needs.spec.describe()})")
    console.print(f"Context: {needs.context_tokens:,} tokens")
    lengths = list(nodes[0].fit.agents) if nodes else []
    shown = table("node", numbers=("room for KV", "longest", *(f"agents of {tokens:,}" for tokens in lengths)))
    for node in nodes:
        agents = [f"{node.fit.agents[tokens]:,}" for tokens in lengths]
        shown.add_row(Text(node.name), size(node.fit.room_bytes), f"{node.fit.context_tokens:,}", *agents)
    console.print(shown)
    for node in nodes:
        for line in _advice(model, needs, node):
            console.print(line)


def _advice(model: str, needs: ModelEstimate, node: _OnNode) -> Iterator[str]:
    if node.fit.context_tokens >= min(needs.context_tokens, 8_000):
        return
    what = "does not fit" if not node.fit.context_tokens else "has little room for KV"
    if node.recipe is not None:
        command = f"`satchel convert {model} --recipe {node.recipe}`"
        yield f"It {what} ({node.name}): {command} makes {size(needs.recipes[node.recipe])} of it, which fits."
    elif needs.recipes:
        least = size(min(needs.recipes.values()))
        yield f"It {what} ({node.name}), nor would it in fewer bits ({least} at least): take a smaller model."
    else:
        yield f"It {what} ({node.name}): take a smaller model or one in fewer bits ({needs.why_not})."
