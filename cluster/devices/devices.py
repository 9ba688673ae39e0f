"""Gives each local node a card of its own, as `devices` in the config says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config.config import Config, check_nodes, local_nodes
from ..errors import ConfigError
from .cards import Card, card_of


def with_devices(config: Config, cards: Sequence[Card]) -> Config:
    """Returns the config with what `devices` means on this machine: nodes with a `device` each. Its `devices` is None.

    Without `nodes` there is a node for each chosen card. With `nodes` each of them gets one card, in order. With `auto`
    and at most one card there is one node, which computes where MLX does by default, or the nodes as they are.

    Args:
        cards: those of this machine that are visible.

    Raises:
        ConfigError: a card does not exist or is chosen twice, there are fewer cards than asked for, or not as many as
            nodes; or a model names a node that there is not.
    """
    if config.devices is None:
        return config
    chosen = _chosen(config.devices, cards)
    if config.devices == "auto" and (not chosen or (len(chosen) == 1 and not config.nodes)):
        nodes = config.nodes
    else:
        nodes = config.nodes or local_nodes(len(chosen))
        if len(nodes) != len(chosen):
            raise ConfigError(
                f"devices: there are {len(nodes)} nodes for {_counted(chosen)}: name as many cards as nodes, or leave "
                "`nodes` out",
                param="devices",
            )
        nodes = tuple(replace(node, device=card.uuid) for node, card in zip(nodes, chosen, strict=True))
    found = replace(config, nodes=nodes, devices=None)
    check_nodes(found, source="config")
    return found


def _chosen(devices: object, cards: Sequence[Card]) -> list[Card]:
    """Returns the cards that `devices` names."""
    if devices == "auto":
        return list(cards)
    if isinstance(devices, int):
        if devices > len(cards):
            raise ConfigError(
                f"devices: {devices} cards are asked for, and this machine has {_counted(cards)}", param="devices"
            )
        return list(cards[:devices])
    assert isinstance(devices, tuple)
    chosen: list[Card] = []
    for position, device in enumerate(devices):
        where = f"devices[{position}]"
        card = card_of(device, cards, where=where)
        if card in chosen:
            raise ConfigError(f"{where}: {card.describe()} is there twice", param=where)
        chosen.append(card)
    return chosen


def _counted(cards: Sequence[Card]) -> str:
    return f"{len(cards)} card{'s' * (len(cards) != 1)}" if cards else "no card that CUDA programs see"
