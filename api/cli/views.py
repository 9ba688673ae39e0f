"""The read-only commands: `status`, `models`, `doctor`, `explain`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.text import Text

from ...cluster.config.config import Config
from ...cluster.errors import ConfigError, InvalidRequest, NotRunning, SatchelError
from ...cluster.home import Home
from .endpoint import FoundEndpoint, find_endpoint
from .tables import NameTable, duration, names_line, size, state_line, table

if TYPE_CHECKING:
    from ...cluster.bring_up.doctor import Check

_OF_REPLICA = (
    "node",
    "tokens_per_s",
    "pid",
    "model_id",
    "idle_s",
    "differs",
    "decoding",
    "multiplying",
    "proving",
    "stages",
    "adapters",
    "slots",
    "memory_bytes",
    "memory_bytes_max",
)
"""The fields of a replica in the cluster's view that are not in its metrics."""

_COLUMNS = {
    "vllm:num_requests_running": "runs",
    "vllm:num_requests_waiting": "waits",
    "satchel_requests_total": "requests",
    "vllm:prompt_tokens_total": "in",
    "vllm:prompt_tokens_cached_total": "cached",
    "vllm:generation_tokens_total": "out",
}
"""A replica's columns, by their names in `/metrics`."""


_BUSY = ("running", "waiting")


def _replicas(metrics: str) -> dict[str, dict[str, Any]]:
    """Reads the replicas in Prometheus' text: name -> model, up, and the numbers of `_COLUMNS` by metric name."""
    replicas: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.labels.get("replica") or sample.labels.get("engine")
            if name is None:
                continue
            if sample.name == "satchel_replica_up":
                found = {"model": sample.labels.get("model", ""), "up": sample.value == 1.0}
            elif sample.name in _COLUMNS:
                found = {sample.name: int(sample.value)}
            else:
                # Replicas that are gone still have histograms.
                continue
            replicas.setdefault(name, {}).update(found)
    return replicas


def _cluster(session: httpx.Client) -> dict[str, Any]:
    """Returns the view of the cluster without its agents; {} if there is no answer, so that the rest is still shown."""
    answer = session.get("/v1/cluster", params={"agents": "0"})
    try:
        return answer.json() if answer.is_success else {}
    except ValueError:
        return {}


def _rate(bytes_per_s: float | None) -> str:
    """Formats a rate; "" for a link that has not transferred enough to be measured."""
    return "rate unknown" if bytes_per_s is None else f"{size(int(bytes_per_s))}/s"


def node_table(nodes: list[dict[str, Any]]) -> NameTable:
    """Returns the cluster's nodes as a table."""
    cards = ["card"] if any(node.get("card") for node in nodes) else []
    numbers = ("memory free", "KV memory", "KV disk", "agents")
    made = table("node", "up", *cards, "address", "links", numbers=numbers)
    for node in nodes:
        tiers = node.get("tiers", {})
        links = [
            f"{link['from']} {link['kind'] or ''} {_rate(link['bytes_per_s'])}".strip()
            for link in node.get("links", [])
        ]
        made.add_row(
            Text(node["name"]),
            "yes" if node.get("up") else "no",
            *[Text(node.get("card") or "") for _ in cards],
            node.get("address", ""),
            Text("\n".join(links)),
            size(node.get("memory_free_bytes")),
            size(tiers.get("memory_bytes")),
            size(tiers.get("disk_bytes")),
            "" if node.get("agents") is None else str(node["agents"]),
        )
    return made


def show_status(home: Home, *, as_json: bool, long: bool = False) -> None:
    """Prints the server, its models and its replicas: for one machine in three lines and what is not as it should be.

    Args:
        long: whether it prints tables and details for one machine, too.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
    """
    found = server_status(home)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console()
    process = f"process {found['pid']}, version {found['version']}"
    console.print(f"{found['url']}  {found['status'] or 'unknown'}  ({process})")
    if found["head"] != found["node"]:
        console.print(f"This machine is {found['node']}, a node of the cluster that {found['head']} leads.")
    nodes = found["nodes"]
    short = len(nodes) == 1 and not long
    if short:
        console.print(Text(_models_line(found)))
        console.print(Text(_memory_line(found)))
    elif nodes:
        console.print(node_table(nodes))
    for name, why in found["disk_errors"].items():
        console.print(Text(f"{name} cannot write KV to disk, and tries again: {why}"))
    for node in nodes:
        if node.get("agents_let_go"):
            count = node["agents_let_go"]
            console.print(Text(f"{node['name']} evicted {count} agents to make room (transcripts_bytes_max)"))
    if any(node.get("joules") for node in nodes):
        console.print(Text(energy_line(nodes)))
    if not short:
        console.print(_replica_table(found["replicas"], found["models"]))
    for name, entry in sorted(found["replicas"].items()):
        for line in _replica_lines({"proving": entry.get("proving")} if short else entry):
            console.print(Text(f"{name} {line}"))


def energy_line(nodes: Sequence[dict[str, Any]]) -> str:
    """Returns what the nodes' counters of energy have counted since their stores started."""
    said = [
        f"{node['name']} {joules / 1e3:,.1f} kJ ({source})"
        for node in nodes
        for source, joules in sorted((node.get("joules") or {}).items())
    ]
    return f"Energy: {', '.join(said)}"


def _models_line(found: dict[str, Any]) -> str:
    """Returns what each model does now."""
    said, adapters = [], _adapters(found["replicas"])
    for name, answers in found["models"].items():
        if name in adapters:
            continue
        own = [entry for entry in found["replicas"].values() if entry.get("model") == name]
        running, waiting = (sum(entry.get(f"vllm:num_requests_{what}", 0) for entry in own) for what in _BUSY)
        rate = sum(entry.get("tokens_per_s") or 0.0 for entry in own)
        idle = min((entry.get("idle_s") or 0.0 for entry in own), default=0.0)
        if not answers:
            does = "does not answer"
        elif running or waiting:
            does = f"{running} running, {waiting} waiting, {rate:g} tokens/s"
        else:
            does = f"idle for {duration(idle)}"
        said.append(f"{name}: {does}")
    return "; ".join(said)


def _adapters(replicas: dict[str, dict[str, Any]]) -> set[str]:
    """Returns the names of all adapters that replicas have."""
    return {name for entry in replicas.values() for name in entry.get("adapters") or ()}


def _memory_line(found: dict[str, Any]) -> str:
    """Returns what the only machine's memory and disk hold."""
    (node,), replicas = found["nodes"], found["replicas"].values()
    held, most = (sum(entry.get(name) or 0 for entry in replicas) for name in ("memory_bytes", "memory_bytes_max"))
    disk = node["tiers"]["disk_bytes"]
    parts = [f"KV {size(held)} of {size(most)} in memory{'' if disk is None else f', {size(disk)} on disk'}"]
    if (agents := node["agents"]) is not None:
        parts.append(f"{agents} agent{'s' * (agents != 1)}")
    if (free := node["memory_free_bytes"]) is not None:
        parts.append(f"{size(free)} of memory free")
    if card := node.get("card"):
        parts.append(card)
    return "; ".join(parts)


def server_status(home: Home) -> dict[str, Any]:
    """Returns what the running server says of itself, its nodes, models and replicas.

    Raises:
        NotRunning: none runs on the home, or it does not answer.
    """
    found = find_endpoint(home)
    record = found.record
    with client_of(found, timeout_s=15.0) as session:
        health = get_json(session, "/health", also=(503,))
        metrics = session.get("/metrics")
        if not metrics.is_success:
            raise error_of(metrics)
        cluster = _cluster(session)
    replicas = _replicas(metrics.text)
    for each in cluster.get("replicas", []):
        if each["id"] in replicas:
            replicas[each["id"]].update({name: each.get(name) for name in _OF_REPLICA})
    return {
        "home": str(home.root),
        "url": found.url,
        "node": record.node,
        "head": found.head or record.node,
        "pid": record.pid,
        "version": record.version,
        "logs": str(record.log_dir),
        "status": health.get("status"),
        "models": health.get("models", {}),
        "disk_errors": health.get("disk_errors", {}),
        "nodes": cluster.get("nodes", []),
        "replicas": replicas,
    }


def _replica_table(replicas: dict[str, dict[str, Any]], models: dict[str, bool]) -> NameTable:
    made = table("replica", "node", "model", "up", numbers=(*_COLUMNS.values(), "tokens/s"))
    for name, entry in sorted(replicas.items()):
        numbers = [str(entry.get(metric, "")) for metric in _COLUMNS]
        rate = entry.get("tokens_per_s")
        up = "yes" if entry.get("up") else "no"
        names = [Text(name), Text(entry.get("node", "")), Text(entry.get("model", ""))]
        made.add_row(*names, up, *numbers, "" if rate is None else f"{rate:g}")
    adapters = _adapters(replicas)
    for name, answers in models.items():
        if name not in adapters and not any(entry.get("model") == name for entry in replicas.values()):
            made.add_row("", "", Text(name), "yes" if answers else "no")
    return made


def _replica_lines(entry: dict[str, Any]) -> Iterator[str]:
    """Yields the lines about a replica below the table."""
    if most := entry.get("memory_bytes_max"):
        slots = ", ".join(f"{count} {state}" for state, count in entry["slots"].items())
        yield f"has {size(entry['memory_bytes'])} of {size(most)} for KV and pictures; block slots: {slots}"
    if decoding := entry.get("decoding"):
        yield f"reads KV {decoding}"
    if multiplying := entry.get("multiplying"):
        yield f"multiplies {multiplying}"
    if proving := entry.get("proving"):
        yield f"is served {_plainly(proving)}"
    if stages := entry.get("stages"):
        yield f"has its layers divided: {stages_line(stages)}"
    if adapters := entry.get("adapters"):
        yield f"has the adapters {', '.join(adapters)}"
    if differs := entry.get("differs"):
        how = ", ".join(f"{setting} {value}" for setting, value in differs.items())
        yield f"computes differently from others ({how}): it shares agents' transcripts, not their KV"


def stages_line(stages: list[dict[str, Any]]) -> str:
    """Returns which layers of a divided model are on which node, as text."""
    found = [(one["first_layer"], one["first_layer"] + one["layers"], one["node"]) for one in stages]
    if len(found) > 1 and len({each[:2] for each in found}) == 1:
        nodes = ", ".join(node for _, _, node in found)
        return f"{found[0][0]} to {found[0][1]}, 1/{len(found)} of each on {nodes}"
    return ", ".join(f"{start} to {stop} on {node}" for start, stop, node in found)


def _plainly(proving: dict[str, Any]) -> str:
    """Returns the words after "is served" for a model or replica whose self-test has not ended."""
    since = time.strftime("%H:%M:%S", time.localtime(proving["since"]))
    mode = f"in plain mode since {since} (one sequence at a time, no cached KV)"
    return f"{mode} until its self-test ends: {proving['what']}"


def show_models(home: Home, *, as_json: bool) -> None:
    """Prints the models.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
    """
    with client(home, timeout_s=15.0) as session:
        found = get_json(session, "/v1/models")
    if as_json:
        print(json.dumps(found.get("data", []), indent=2))
        return
    shown = table("model", "context", "memory", "state")
    for model in found.get("data", []):
        context = f"{model['max_model_len']:,} tokens" if model.get("max_model_len") else ""
        names = names_line(model["id"], model["aliases"])
        shown.add_row(names, context, model.get("memory", ""), state_line(model))
    console = Console(markup=False, highlight=False)
    console.print(shown)
    for model in found.get("data", []):
        if model["error"]:
            console.print(f"{model['id']} could not be loaded the last time: {model['error']}")
        if parent := model.get("parent"):
            console.print(f"{model['id']} is an adapter of {parent}")
        elif kept := kv_line(model):
            console.print(f"{model.get('id', '')} keeps its KV as {kept}")
        if proving := model.get("proving"):
            console.print(f"{model.get('id', '')} is served {_plainly(proving)}")
        for note in model.get("notes", []):
            console.print(f"{model.get('id', '')}: {note}")


def kv_line(model: dict[str, Any]) -> str:
    """Returns the KV policy of an entry of `/v1/models`, and the reason for it; "" if it has none."""
    kept = model.get("kv") or {}
    return f"{kept['policy']}: {kept['why']}" if kept.get("policy") else ""


def show_decision(home: Home, request_id: str, *, as_json: bool) -> None:
    """Prints why a request was routed as it was, with the estimated cost on each replica.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
        SatchelError: nothing is remembered of the request.
    """
    with client(home, timeout_s=15.0) as session:
        found = get_json(session, f"/v1/cluster/decisions/{quote(request_id, safe='')}")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console(markup=False, highlight=False)
    console.print(f"{found['replica']} on {found['node'] or 'a node that is not known'}: {found['why']}")
    cached, tokens, source = found["cached_tokens"], found.get("pull_tokens"), found.get("pull_from")
    if found.get("prefill_on"):
        console.print(f"{tokens} tokens of the prompt come from {found['prefill_on']}, which has {cached} already.")
        terms = ", ".join(f"{term} {seconds:.4f}" for term, seconds in found["split_costs_s"].items())
        console.print(f"Estimated seconds of the two together, and of the best one alone: {terms}")
    else:
        pulled = f", {tokens} of them pulled from {source}" if source else ""
        console.print(f"{cached} tokens of the prompt need not be computed there{pulled}.")
    console.print("Estimated seconds to the first token:")
    costs: dict[str, dict[str, float]] = found.get("costs_s", {})
    joules: dict[str, float] = found.get("energy_j") or {}
    columns = list(dict.fromkeys(term for cost in costs.values() for term in cost))
    shown = table("replica", numbers=tuple(columns))
    for name, cost in sorted(costs.items(), key=lambda item: item[1].get("total", 0.0)):
        style = "bold" if name == found["replica"] else ""
        shown.add_row(Text(name), *(f"{cost[term]:.4f}" if term in cost else "" for term in columns), style=style)
    console.print(shown)
    if joules:
        taken = ", ".join(f"{name} {value:.1f}" for name, value in sorted(joules.items(), key=lambda each: each[1]))
        console.print(Text(f"Estimated joules: {taken}"))
    for line in _actual_lines(found):
        console.print(line)


def _actual_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields a routed request's actual values beside the estimates."""
    cached, first_s = found.get("actual_cached_tokens"), found.get("actual_first_token_s")
    if cached is None and first_s is None:
        yield "The actual values are shown once the request has ended."
    if cached is not None:
        yield f"Cached tokens: {found['cached_tokens']} estimated, {cached} actual."
    if first_s is not None:
        costs = found.get("split_costs_s") if found.get("prefill_on") else found["costs_s"].get(found["replica"])
        estimated = f"{costs['total']:.4f} estimated, " if costs and "total" in costs else ""
        yield f"Seconds to the first token: {estimated}{first_s:.4f} actual."


def show_doctor(
    config: Config,
    home: Home,
    *,
    as_json: bool,
    report: bool = False,
    file: Path | None = None,
    model: str | None = None,
) -> None:
    """Prints the doctor's checks, or writes them into a report. Exits with 1 if one failed."""
    from ...cluster.bring_up.doctor import examine

    if not report and (file is not None or model is not None):
        raise ConfigError("a file and --model are only for `satchel doctor --report`")
    checks = [*examine(config, home), *_server_checks(home)]
    if report:
        from .report.run import write_report

        status: dict[str, Any] = {}
        with suppress(SatchelError):
            status = server_status(home)
        print(f"Written: {write_report(config, home, checks, status, file, model)}")
        print("It has no names or addresses of machines and no keys. Read it before you send it.")
    elif as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        shown = table("check", "", "found", "how to fix it")
        for check in checks:
            shown.add_row(
                check.name, Text(check.result, style=colours[check.result]), Text(check.found), Text(check.mend)
            )
        Console().print(shown)
    if any(check.result == "fail" for check in checks):
        raise typer.Exit(1)


def _server_checks(home: Home) -> list[Check]:
    """Returns checks of the running server: each model's KV policy and the reason for it, which self-tests have not
    ended, where the layers of divided models are, and which nodes cannot write KV to disk; none if no server
    answers."""
    from ...cluster.bring_up.doctor import Check

    try:
        with client(home, timeout_s=5.0) as session:
            models = get_json(session, "/v1/models").get("data", [])
            closed = get_json(session, "/health", also=(503,)).get("disk_errors", {})
    except SatchelError:
        # The other checks say what is wrong with the server.
        return []
    models = [model for model in models if not model.get("parent")]
    checks = [Check(f"kv of {model.get('id', '')}", "ok", kept) for model in models if (kept := kv_line(model))]
    for model in models:
        if proving := model.get("proving"):
            checks.append(Check(f"self-test of {model.get('id', '')}", "ok", f"it is served {_plainly(proving)}"))
        if stages := model.get("stages"):
            checks.append(Check(f"layers of {model.get('id', '')}", "ok", f"divided: {stages_line(stages)}"))
    mend = "make room there, or lower disk_bytes_max: answers continue, but agents' KV is computed again"
    return [
        *checks,
        *(Check(f"disk of {node}", "warn", f"KV is not written: {why}", mend) for node, why in closed.items()),
    ]


@contextmanager
def client(home: Home, *, timeout_s: float) -> Iterator[httpx.Client]:
    """Opens an HTTP client of the home's endpoint (`find_endpoint`), with its owner's key and without proxies.

    Raises:
        NotRunning: no server runs there, or it does not answer.
        ClusterError: this machine is a node of a cluster whose endpoint it cannot reach.
    """
    with client_of(find_endpoint(home), timeout_s=timeout_s) as session:
        yield session


@contextmanager
def client_of(found: FoundEndpoint, *, timeout_s: float) -> Iterator[httpx.Client]:
    """As `client`, for an endpoint that was already found."""
    options: dict[str, Any] = {"timeout": httpx.Timeout(timeout_s, connect=5.0), "trust_env": False}
    if found.key:
        options["headers"] = {"Authorization": f"Bearer {found.key}"}
    if found.certificate is not None:
        # Imported here because cryptography takes long to import.
        from ...cluster.trust.endpoint_certificate import client_context, context_trusting

        options["verify"] = (context_trusting if found.head else client_context)(found.certificate)
    try:
        with httpx.Client(base_url=found.url, **options) as session:
            yield session
    except httpx.TimeoutException:
        raise NotRunning(f"the endpoint at {found.url} does not answer in time") from None
    except httpx.TransportError as error:
        raise NotRunning(f"cannot reach the endpoint at {found.url}: {error}") from None


def error_of(response: httpx.Response) -> SatchelError:
    """Returns the error of a failed response, whose body must have been read."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip()[:200] or "no reason given"
    return SatchelError(f"the endpoint answered {response.status_code}: {message}")


def get_json(session: httpx.Client, path: str, *, also: tuple[int, ...] = ()) -> Any:
    """Returns the JSON at a path.

    Raises:
        SatchelError: the status is not 2xx nor one of `also`, or the body is not JSON.
    """
    response = session.get(path)
    if not response.is_success and response.status_code not in also:
        raise error_of(response)
    try:
        return response.json()
    except ValueError:
        raise SatchelError(f"the endpoint's answer to {path} is not JSON") from None


def named_model(session: httpx.Client, name: str | None) -> dict[str, Any]:
    """Returns what `/v1/models` says of the model that has this name or alias; of the first one without a name.

    Raises:
        SatchelError: no model is served yet.
        InvalidRequest: none has the name. The endpoint might answer it with another model.
    """
    models: list[dict[str, Any]] = get_json(session, "/v1/models")["data"]
    if not models:
        raise SatchelError("the endpoint serves no model yet")
    for each in models:
        if name is None or name in (each["id"], *each["aliases"]):
            return each
    raise InvalidRequest(f"no model {name} is served; there are: {', '.join(each['id'] for each in models)}")
