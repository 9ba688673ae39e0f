"""What may happen to a scheduler, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from satchel.actors.replica.scheduling.limits import Limits


@dataclass(frozen=True)
class World:
    """What may happen. `calm` means that no sequence is lost, late or sent back, so nothing is computed twice."""

    seed: int
    limits: Limits
    steps: int = 500
    bursts: float = 0.12
    """How often requests come, per step."""
    priorities: int = 1
    aborts: float = 0.0
    deadlines: bool = False
    poisoned: float = 0.0
    """Share of sequences that break every decode step they are in."""
    failures: float = 0.0
    """Share of all calls that fail at random."""
    forgetful: bool = False
    """Computed blocks are soon gone."""

    @property
    def calm(self) -> bool:
        even = self.priorities == 1 and not self.forgetful and self.limits.kv_tokens_max > 10**6
        return even and not (self.aborts or self.deadlines or self.poisoned or self.failures)

    @property
    def fair(self) -> bool:
        return self.priorities == 1 and not (self.poisoned or self.failures)


def make_world(seed: int) -> World:
    rng = random.Random(seed)
    kind = seed % 5
    limits = Limits(
        sequences_max=rng.randint(1, 8),
        queue_requests_max=rng.randint(4, 24),
        prefill_chunk_tokens=rng.choice([256, 512]),
        kv_tokens_max=10**7 if kind == 0 else rng.choice([700, 1500, 2500, 8000, 30_000]),
        prefill_sequences_max=rng.randint(1, 4),
        sequence_tokens=rng.choice([0, 0, 200]),
        paged=(paged := rng.random() < 0.6),
        shares=paged and rng.random() < 0.7,
        stops_at_borders=seed % 4 == 0,
    )
    world = World(seed, limits, bursts=rng.choice([0.03, 0.1, 0.4]))
    if kind == 1:
        return replace(world, forgetful=True)
    if kind == 2:
        return replace(world, priorities=3, aborts=0.03, forgetful=rng.random() < 0.5)
    if kind == 3:
        roomy = replace(limits, kv_tokens_max=10**7)
        return replace(world, limits=roomy, bursts=0.2, priorities=3, poisoned=0.1, aborts=0.02)
    if kind == 4:
        return replace(world, priorities=2, aborts=0.03, deadlines=True, failures=0.02, poisoned=0.03)
    return world
