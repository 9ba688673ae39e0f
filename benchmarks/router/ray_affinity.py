"""Ray's `PrefixCacheAffinityRouter` by itself, in simulated time: its rule and its prefix tree, without Ray Serve.

Serve would hand it replicas, their queue lengths, and an actor that holds the tree. Here are stand-ins for the three:
queue lengths are always right, and the tree is called directly. Of the candidates that the rule names the one with the
shortest queue is taken, as Serve does; where it names none, the better of two at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from satchel.actors.protocol.router_messages import Decision, RouteRequest

from .engines import Replica
from .proxies import text_of


class RayAffinity:
    """A `Router` for `replaying.py`.

    Args:
        imbalanced_threshold: how many requests more than the least a replica may have and the prefix still decides.
            Ray's default is infinite.
    """

    def __init__(self, names: list[str], imbalanced_threshold: float) -> None:
        # Importing Ray takes seconds.
        from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router as rule
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._queues = dict.fromkeys(names, 0)
        self._rng = random.Random(0)
        self._tree = PrefixTree()
        self._tree.add_tenants(names, 0.0)
        self._rule = rule
        self._replicas = [SimpleNamespace(replica_id=SimpleNamespace(to_full_id_str=lambda n=n: n)) for n in names]
        self._state = SimpleNamespace(
            _use_replica_queue_len_cache=False,
            _probe_queue_lens=self._probe,
            _imbalanced_threshold=imbalanced_threshold,
            _match_rate_threshold=0.1,
            _tree_actor=_Direct(self._tree),
            _replicas={name: name for name in names},
            _extract_text_from_request=lambda request: request.args[0],
        )

    def route(self, request: RouteRequest, now: float) -> Decision:
        text = text_of(request)
        names = self._candidates(text) or self._rng.sample(list(self._queues), min(2, len(self._queues)))
        name = min(names, key=lambda name: self._queues[name])
        self._queues[name] += 1
        self._tree.insert(text, name, now)
        return Decision(name, "peer")

    def release(self, replica: str, request_id: str) -> None:
        self._queues[replica] -= 1

    def observe(self, engines: Iterable[Replica], now: float) -> None:
        pass

    def _candidates(self, text: str) -> list[str]:
        module: Any = self._rule
        choose = module.PrefixCacheAffinityRouter._prefix_match_best_replicas
        pending = SimpleNamespace(args=[text])
        # What it asks of Ray: to wait for an actor's answer, and to read a replica's id.
        kept = module.ray, module.ReplicaID
        module.ray = SimpleNamespace(get=lambda answer: answer)
        module.ReplicaID = SimpleNamespace(from_full_id_str=lambda name: name)
        try:
            chosen = _finished(choose(self._state, pending, self._replicas))
        finally:
            module.ray, module.ReplicaID = kept
        return chosen[0]

    async def _probe(self, replicas: list[Any], _timeout: int) -> list[tuple[Any, int]]:
        return [(replica, self._queues[replica.replica_id.to_full_id_str()]) for replica in replicas]


class _Direct:
    """An actor's handle whose `method.remote(…)` answers at once."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


def _finished(coroutine: Any) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits")
