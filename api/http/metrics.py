"""The metrics of `/metrics`: the replicas' and nodes' numbers, read at every scrape, and what this process counts.

Names, units and labels follow Prometheus' conventions. What vLLM measures too has vLLM's names and labels
(`pipeline/sequence_metrics.py` has more of these), all else begins with `satchel_`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..agents.memory import AgentMemory
from ..pipeline.generation import Generator
from ..pipeline.sequence_metrics import LABELS
from ..requests.backend import NodeState, ReplicaStats
from ..views.cluster import disk_errors

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)


class _Replicas(Collector):
    """One reading of the replicas. Totals of a replica that did not answer are left out, because 0 would look like a
    reset."""

    def __init__(self, stats: Sequence[ReplicaStats], failovers: int) -> None:
        self._stats = stats
        self._failovers = failovers

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("satchel_replica_up", "Whether the replica answers.", labels=["replica", "model"])
        for stats in self._stats:
            up.add_metric([stats.replica, stats.model], float(stats.answers))
        yield up
        proving = GaugeMetricFamily(
            "satchel_replica_proving",
            "Whether its model is served in plain mode during its self-test.",
            labels=["replica"],
        )
        for stats in self._stats:
            proving.add_metric([stats.replica], float(bool(stats.proving)))
        yield proving
        yield from self._vllm()
        yield self._gauge("satchel_prefix_blocks", "Cached KV blocks.", "prefix_blocks")
        yield self._gauge("satchel_prefix_bytes", "Bytes of cached KV.", "prefix_bytes")
        yield self._slots()
        memory = "Bytes of KV, pictures and free slots in memory."
        yield self._gauge("satchel_memory_bytes", memory, "memory_bytes")
        yield self._gauge(
            "satchel_memory_bytes_max", "The most bytes that satchel_memory_bytes may reach now.", "memory_bytes_max"
        )
        yield self._counter("satchel_requests", "Requests accepted.", "requests_total")
        yield self._counter("satchel_embedded_tokens", "Tokens of texts embedded or ranked.", "embedded_tokens_total")
        yield self._counter("satchel_images", "Images made.", "images_total")
        yield self._counter("satchel_image_steps", "Steps of images computed.", "image_steps_total")
        yield self._counter("satchel_transcripts", "Transcripts made by models of speech.", "transcripts_total")
        transcribed = "Seconds of audio that models of speech wrote down."
        yield self._counter("satchel_transcribed_seconds", transcribed, "transcribed_s_total")
        yield self._counter("satchel_speeches", "Texts spoken.", "speeches_total")
        yield self._counter("satchel_spoken_seconds", "Seconds of audio spoken.", "spoken_s_total")
        yield self._counter(
            "satchel_prepared_tokens", "Tokens prefilled before a request needed them.", "prepared_tokens_total"
        )
        used = "Prepared tokens that a request used."
        yield self._counter("satchel_prepared_tokens_used", used, "prepared_tokens_used_total")
        wasted = "Prepared tokens that were evicted before a request used them."
        yield self._counter("satchel_prepared_tokens_wasted", wasted, "prepared_tokens_wasted_total")
        yield self._counter("satchel_restored_tokens", "Tokens whose KV came back from disk.", "restored_tokens_total")
        yield self._counter("satchel_written_bytes", "Bytes of KV written to disk.", "written_bytes_total")
        yield self._counter("satchel_unwritten_turns", "Turns whose KV could not be written.", "unwritten_turns_total")
        yield self._counter("satchel_blocks_corrupt", "Entries on disk that were damaged.", "blocks_corrupt_total")
        yield self._counter(
            "satchel_split_requests", "Answers whose prompt another node prefilled.", "split_requests_total"
        )
        fell_back = "Split requests whose KV did not arrive completely, so that the rest was computed."
        yield self._counter("satchel_split_fallbacks", fell_back, "split_fallbacks_total")
        yield self._counter(
            "satchel_device_failures", "Device errors after which sequences were restarted.", "device_failures_total"
        )
        yield self._counter(
            "satchel_failed_checks",
            "Times KV was dropped because a check of the block tables failed.",
            "failed_checks_total",
        )
        yield self._token_joules()
        hits = "Pictures that were not encoded, because their embeddings or KV were cached."
        yield self._counter("satchel_vision_cache_hits", hits, "vision_cache_hits_total")
        yield self._counter("satchel_vision_encodes", "Pictures that were encoded.", "vision_encodes_total")
        drafted = "Tokens that a small model drafted."
        yield self._counter("satchel_model_drafted_tokens", drafted, "model_drafted_tokens_total")
        right = "Tokens that a small model drafted and that were right."
        yield self._counter("satchel_model_accepted_tokens", right, "model_accepted_tokens_total")
        went_on = "Answers that failed over after their replica was lost."
        yield CounterMetricFamily("satchel_failovers", went_on, value=self._failovers)

    def _vllm(self) -> Iterable[Metric]:
        """Yields what vLLM measures too, under its names and labels."""
        usage = "The part of the KV memory for sequences that they hold: 1 is all of it."
        for name, what, field in (
            ("num_requests_running", "Requests in the replica's batch.", "running"),
            ("num_requests_waiting", "Requests in the replica's queue.", "waiting"),
            ("kv_cache_usage_perc", usage, "kv_usage"),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", what, labels=LABELS)
            for stats in self._stats:
                family.add_metric([stats.model, stats.replica], getattr(stats, field))
            yield family
        for name, what, field in (
            ("num_preemptions", "Times that a sequence lost its place in the batch to another.", "preemptions_total"),
            ("prompt_tokens", "Prompt tokens of requests that got a place in the batch.", "prompt_tokens_total"),
            ("prompt_tokens_cached", "Prompt tokens whose KV was reused, from memory or disk.", "cached_tokens_total"),
            ("prefix_cache_queries", "Prompt tokens that were looked up in memory.", "prompt_tokens_total"),
            ("prefix_cache_hits", "Prompt tokens that were found in memory.", "hot_tokens_total"),
            ("generation_tokens", "Tokens generated.", "generated_tokens_total"),
            ("spec_decode_num_drafts", "Drafts that were computed.", "drafts_total"),
            ("spec_decode_num_draft_tokens", "Tokens of drafts.", "drafted_tokens_total"),
            ("spec_decode_num_accepted_tokens", "Tokens of drafts that were right.", "accepted_tokens_total"),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", what, labels=LABELS)
            for stats in self._stats:
                if stats.answers:
                    counter.add_metric([stats.model, stats.replica], getattr(stats, field))
            yield counter

    def _slots(self) -> Metric:
        what = "Slots of the block pool by their use."
        family = GaugeMetricFamily("satchel_slots", what, labels=["replica", "state"])
        for stats in self._stats:
            for state in ("running", "kept", "free"):
                family.add_metric([stats.replica, state], getattr(stats, f"slots_{state}"))
        return family

    def _token_joules(self) -> Metric:
        what = "Joules of a token, with all that the node's card or machine takes meanwhile, as lately measured."
        family = GaugeMetricFamily("satchel_token_joules", what, labels=["replica", "phase"])
        for stats in self._stats:
            for phase, joules in (("prefill", stats.prefill_token_j), ("decode", stats.decode_token_j)):
                # 0 is not measured, or never will be.
                if joules > 0.0:
                    family.add_metric([stats.replica, phase], joules)
        return family

    def _gauge(self, name: str, help_text: str, field: str) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=["replica"])
        for stats in self._stats:
            family.add_metric([stats.replica], getattr(stats, field))
        return family

    def _counter(self, name: str, help_text: str, field: str) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=["replica"])
        for stats in self._stats:
            if stats.answers:
                family.add_metric([stats.replica], getattr(stats, field))
        return family


class _NodeCollector(Collector):
    """One reading of the nodes, without what those that did not report would say."""

    def __init__(self, nodes: Sequence[NodeState]) -> None:
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("satchel_node_up", "Whether the node reported lately.", labels=["node"])
        used = GaugeMetricFamily("satchel_disk_bytes", "Bytes of KV on the node's disk.", labels=["node"])
        room = GaugeMetricFamily("satchel_disk_free_bytes", "Further bytes of KV that may be written.", labels=["node"])
        opened = GaugeMetricFamily("satchel_disk_open", "Whether KV is written to the node's disk.", labels=["node"])
        closed = disk_errors(self._nodes)
        gone = "Agents that were evicted to make room (transcripts_bytes_max)."
        let_go = CounterMetricFamily("satchel_agents_let_go", gone, labels=["node"])
        counted = (
            "Joules that a counter of the node's machine (rapl, powermetrics) or card (nvml) has counted since the "
            "store started, of all that runs there and of idle times too. Nodes of one machine count the same."
        )
        joules = CounterMetricFamily("satchel_energy_joules", counted, labels=["node", "source"])
        for node in self._nodes:
            up.add_metric([node.name], float(node.up))
            if node.disk_bytes is not None:
                used.add_metric([node.name], node.disk_bytes)
            if node.disk_free_bytes is not None:
                room.add_metric([node.name], node.disk_free_bytes)
            if node.agents_let_go is not None:
                opened.add_metric([node.name], float(node.name not in closed))
                let_go.add_metric([node.name], node.agents_let_go)
            for source, value in sorted(node.joules.items()):
                joules.add_metric([node.name, source], value)
        yield from (up, used, room)
        yield opened
        yield let_go
        yield joules


class Metrics:
    """The metrics of one application, with those of its sequences and of its agents' memory."""

    def __init__(self, generator: Generator) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(generator.metrics.registry)
        if generator.memory is not None:
            self.registry.register(AgentMetrics(generator.memory))
        self._requests = Counter(
            "satchel_http_requests", "HTTP requests by route and status.", ["route", "status"], registry=self.registry
        )
        self._duration = Histogram(
            "satchel_http_request_duration_seconds",
            "From a request's arrival to the last byte of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def request_ended(self, route: str, status: int, duration_s: float) -> None:
        """Counts one request. `route` is a route's pattern, never a caller's path, which would be unbounded."""
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(duration_s)

    def render(self, stats: Sequence[ReplicaStats], failovers: int, nodes: Sequence[NodeState] = ()) -> bytes:
        """Renders all metrics in Prometheus' text format.

        Args:
            failovers: how many sequences have failed over since this process started.
        """
        replicas = CollectorRegistry()
        replicas.register(_Replicas(stats, failovers))
        replicas.register(_NodeCollector(nodes))
        return generate_latest(replicas) + generate_latest(self.registry)


class AgentMetrics(Collector):
    """The counters of one `AgentMemory`."""

    def __init__(self, memory: AgentMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        memory = self._memory
        yield _counter("satchel_prefix_match", "Prompts by how they continue their agent.", "match", memory.matches)
        yield _counter(
            "satchel_prefix_recomputed_tokens",
            "Tokens of an agent's memory that could not be reused, by reason.",
            "reason",
            memory.recomputed,
        )
        yield _counter("satchel_agent_turns", "Agents' turns by outcome.", "outcome", memory.commits)
        yield _counter(
            "satchel_turns_not_kept", "Turns whose transcript was not kept, by reason.", "reason", memory.unkept
        )
        copied = "Turns that were not copied to enough nodes in time (replication)."
        yield CounterMetricFamily("satchel_turns_not_copied", copied, value=memory.uncopied)
        yield CounterMetricFamily("satchel_moves", "Agents moved to another node.", value=memory.moves.total)
        rewrites = {
            "predicted": memory.programs.confirmed,
            "not predicted": memory.programs.contradicted,
            "not explained": memory.programs.unexplained,
        }
        yield _counter(
            "satchel_history_rewrites", "Histories that programs rewrote, by what was learned.", "outcome", rewrites
        )
        carried = "Bytes of KV that moved with agents to other nodes."
        yield CounterMetricFamily("satchel_moved_bytes", carried, value=memory.moves.bytes_total)


def _counter(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
