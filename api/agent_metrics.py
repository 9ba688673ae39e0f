"""What `/metrics` shows of agents' memory, read at every scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .agents import AgentMemory


class AgentMetrics(Collector):
    """The counters of one `AgentMemory`."""

    def __init__(self, memory: AgentMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        memory = self._memory
        yield _counter("satchel_prefix_match", "Prompts by how they continue their agent.", "match", memory.matches)
        yield _counter(
            "satchel_prefix_recomputed_tokens",
            "Tokens in an agent's memory that a prompt could not continue, by reason.",
            "reason",
            memory.recomputed,
        )
        yield _counter("satchel_agent_turns", "Agents' turns by what became of them.", "outcome", memory.commits)
        yield _counter("satchel_turns_not_kept", "Turns whose words are not kept, by reason.", "reason", memory.unkept)
        copied = "Turns of which fewer nodes had the words in time than should (replication)."
        yield CounterMetricFamily("satchel_turns_not_copied", copied, value=memory.uncopied)
        yield CounterMetricFamily("satchel_moves", "Agents moved to another node.", value=memory.moves.total)
        carried = "Bytes of KV that went with agents to other nodes."
        yield CounterMetricFamily("satchel_moved_bytes", carried, value=memory.moves.bytes_total)


def _counter(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
