"""Writes the report: checks, facts of the machine, what a model does on its device, and what a running server says."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....cluster.bring_up.facts import machine_facts
from ....cluster.config.config import Config
from ....cluster.environment import mlx_settings, snapshot
from ....cluster.errors import ClusterError, SatchelError
from ....cluster.home import Home, expanded
from ....cluster.trust.invitations import remembered
from ....cluster.trust.members import members
from ..progress import ProgressDisplay
from .measuring import child_command, measure
from .redaction import Redaction

if TYPE_CHECKING:
    from ....cluster.bring_up.check import Check

DEFAULT_FILE = Path("satchel-report.md")
EMBEDDED = "embedded:recall"
"""The model that is measured unless another is named."""

_OF_REPLICA = (
    "model",
    "up",
    "tokens_per_s",
    "decoding",
    "multiplying",
    "proving",
    "differs",
    "slots",
    "memory_bytes",
    "memory_bytes_max",
)
_SHOWN = ("satchel", "mlx", "mlx-lm", "ray")
"""Packages whose versions are in the report's head; all are in its JSON."""

_NO_NAMES = {"", "local", "localhost"}
SECRET_CHARACTERS_MIN = 8
_SECRET_VARIABLES = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_TEXTS_OF_CALLERS = ("last 24 h: given_up", "last 24 h: refused")
"""Checks whose text may name tenants, or say what a request was."""


def write_report(
    config: Config,
    home: Home,
    checks: Sequence[Check],
    status: dict[str, Any],
    file: Path | None,
    model: str | None,
) -> Path:
    """Measures and writes the report; takes a minute or more. Returns its file.

    Args:
        checks: what `doctor` found.
        status: what a running server says of itself (`satchel status --json`); {} if none answers.
        file: None for `satchel-report.md` in this folder.
        model: a source, or the name of one of the config's models.

    Raises:
        ClusterError: the file cannot be written.
    """
    path = expanded(file or DEFAULT_FILE)
    if not path.parent.is_dir() or path.is_dir():
        raise ClusterError(f"the report cannot be written: {path} is no file in a folder that exists")
    source = next((each.source for each in config.models if each.name == model), model or EMBEDDED)
    progress = ProgressDisplay(sys.stderr)

    def say(step: str) -> None:
        progress.report(step, None)

    environment = {**snapshot(), **mlx_settings(home), "SATCHEL_HOME": str(home.root)}
    try:
        found = {
            "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "machine": machine_facts(home),
            "checks": [_without_callers_text(check) for check in checks],
            "server": _of_server(status),
            "measured": [asdict(each) for each in measure(child_command(source), environment, say)],
        }
    finally:
        progress.close()
    text = _redaction(config, home, status, environment)(as_markdown(found))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"the report cannot be written to {path}: {error.strerror or error}") from None
    return path


def _of_server(status: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what a running server says of its replicas and links; None if none answers."""
    if not status:
        return None
    replicas = [{name: each.get(name) for name in _OF_REPLICA} for each in status["replicas"].values()]
    links = [
        {"kind": link["kind"], "bytes_per_s": link["bytes_per_s"]}
        for node in status["nodes"]
        for link in node.get("links", [])
    ]
    return {"status": status["status"], "nodes": len(status["nodes"]), "links": links, "replicas": replicas}


def _without_callers_text(check: Check) -> dict[str, str]:
    found = check.found.partition(": ")[0] if check.name in _TEXTS_OF_CALLERS else check.found
    return asdict(check) | {"found": found}


def _redaction(config: Config, home: Home, status: dict[str, Any], environment: dict[str, str]) -> Redaction:
    names: dict[str, str] = {}

    def call(these: Iterable[str | None], so: str) -> None:
        for name in these:
            if name and name not in _NO_NAMES:
                names.setdefault(name, so)

    nodes = {node.name: [node.name, node.ssh, (node.ssh or "").rpartition("@")[2]] for node in config.machines}
    nodes |= {node["name"]: [node["name"]] for node in status.get("nodes", [])}
    with suppress(SatchelError):
        nodes |= {each.name: [each.name] for each in members(home).admitted.values()}
    for number, of_one in enumerate(nodes.values(), 1):
        call(of_one, f"node-{number}")
    own = socket.gethostname()
    if (membership := remembered(home)) is not None:
        call([membership.name], "this-node")
        call([membership.join_server.rpartition(":")[0]], "the-head")
    call([own, own.partition(".")[0]], "this-machine")
    secrets = [value for name, value in environment.items() if any(part in name.upper() for part in _SECRET_VARIABLES)]
    # Shorter ones are switches, and a path is no secret.
    secrets = [value for value in secrets if len(value) >= SECRET_CHARACTERS_MIN and value[0] not in "/~"]
    own_folder = ""
    with suppress(ClusterError):
        own_folder = str(expanded("~"))
    return Redaction(own_folder, names, secrets)


def as_markdown(found: dict[str, Any]) -> str:
    """Returns a report as text: what matters first, then everything as JSON."""
    machine = found["machine"]
    system, memory, versions = machine["system"], machine["memory"], machine["packages"]
    parts = [
        "# Satchel report",
        f"Made by `satchel doctor --report` at {found['made']}. Names and addresses of machines, keys and tokens are "
        "left out, and there is no text of any conversation. Read it before you send it.",
        _listed(
            [
                f"{system['system']} {system['version']}, {system['machine']}, {system['processor']}",
                f"{memory['total_bytes'] / 2**30:.0f} GiB of memory, {memory['available_bytes'] / 2**30:.1f} available",
                ", ".join(
                    [f"Python {system['python']}", *(f"{name} {versions[name] or 'missing'}" for name in _SHOWN)]
                ),
                "no server answered meanwhile"
                if found["server"] is None
                else "a server was running: the benchmark shared the device with it",
            ]
        ),
    ]
    for number, measured in enumerate(found["measured"]):
        parts += _of_model(measured, again=number > 0)
    rows = [(check["name"], check["result"], check["found"], check["mend"]) for check in found["checks"]]
    parts += ["## Checks", _table(("check", "", "found", "how to fix it"), rows)]
    parts += ["## All of it", f"```json\n{json.dumps(found, indent=1, default=str)}\n```"]
    return "\n\n".join(parts) + "\n"


def _of_model(measured: dict[str, Any], *, again: bool) -> list[str]:
    facts: dict[str, Any] = measured["facts"]
    parts = ["## A model on this device" + (", without kernels" if again else "")]
    lines = []
    if measured["ended"]:
        lines.append(f"**The process ended ({measured['ended']}) at this step: {measured['last_step']}.**")
    if failed := facts.get("failed"):
        lines.append(f"**{failed}**")
    if device := facts.get("device"):
        lines.append(f"Device: {device['name']} ({device['kind']}), kernels: {'yes' if device['kernels'] else 'no'}")
    if model := facts.get("model"):
        lines.append(f"Model: {model['source']}, {model['layers']}, computed in {model['dtype']}")
        lines.append(f"KV is kept as {model['kv']}. Decode steps read it {model['decodes']}")
    if test := facts.get("self_test"):
        result = "passed" if test["served"] and not test["notes"] else "; ".join(test["notes"])
        lines.append(f"Self-test: {result} ({test['took_s']} s)")
    parts.append(_listed(lines))
    if ways := facts.get("decode_ways"):
        rows = [(way["way"], _far(way["off"]), _ms(way["reference_s"], way["step_s"]), way["reason"]) for way in ways]
        titles = ("way to decode", "off, of the largest logit", "a step, reference → this", "not used because")
        parts.append(_table(titles, rows))
    if kernels := facts.get("kernels"):
        parts.append(
            f"Kernels: {kernels['shapes']} shapes checked, {len(kernels['wrong'])} of them off by more than the bound"
            + (f"; {kernels['stopped']}" if kernels["stopped"] else "")
            + "."
        )
        rows = [(name, _far(off)) for name, off in kernels["farthest"].items()]
        parts.append(_table(("policy, dtype, channels", "off, at most"), rows))
    if benchmark := facts.get("benchmark"):
        rates = benchmark["rates"]
        rows = [
            (one["tokens"], one["sequences"], one["prefill_tokens_per_s"], one["decode_tokens_per_s"], one["first_s"])
            for one in rates
        ]
        titles = ("prompt tokens", "sequences", "prefill, tokens/s", "decode, tokens/s", "first prompt, s")
        parts.append(_table(titles, rows))
        if benchmark["left_out"]:
            parts.append(f"Left out: {'; '.join(benchmark['left_out'])}.")
    return parts


def _far(off: float | None) -> str:
    return "not computed" if off is None else f"{off:.1e}"


def _ms(*times_s: float | None) -> str:
    return " → ".join(f"{each * 1000:.2f} ms" for each in times_s if each is not None)


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        return f"| {' | '.join(str('' if cell is None else cell).replace('|', '/') for cell in cells)} |"

    return "\n".join([line(titles), line("---" for _ in titles), *map(line, rows)])
