"""`satchel ps`: the models that run, where, and how busy they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ....cluster.home import Home
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json
from ..tables import duration, names_line, size, state_line, table
from ..views import client, get_json

_ANSWER_S = 15.0


def ps(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the models that run, or are on their way: size, node, sequences, idle time and context."""
    found = running_models(chosen_home(home))
    if json:
        print_json(found)
        return
    comes = any(each["state"] != "loaded" for each in found)
    shown = table("model", "node", *["state"] * comes, numbers=("size", "KV", "sequences", "idle", "context"))
    for each in found:
        busy = each["running"] or each["waiting"]
        waiting = f" + {each['waiting']} waiting" if each["waiting"] else ""
        silent = "does not answer" if each["replica"] else ""
        shown.add_row(
            Text(names_line(each["model"], each["aliases"])),
            Text(each["node"] or ""),
            *[Text(state_line(each))] * comes,
            size(each["weights_bytes"]),
            size(each["kv_bytes"]),
            f"{each['running']}{waiting}" if each["up"] else "",
            silent if not each["up"] else "" if busy else duration(each["idle_s"]),
            "" if not each["context_tokens"] else f"{each['context_tokens']:,}",
        )
    Console(highlight=False).print(shown)


def running_models(home: Home) -> list[dict[str, Any]]:
    """Returns an entry for each replica, and for each model that is being loaded or unloaded and has none, by model in
    the config's order.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
    """
    with client(home, timeout_s=_ANSWER_S) as session:
        described = get_json(session, "/v1/models").get("data", [])
        view = get_json(session, "/v1/cluster?agents=0")
    models = {model["id"]: model for model in view["models"]}
    contexts = {model["id"]: model.get("max_model_len") for model in described}
    order = {name: index for index, name in enumerate(models)}
    have_replicas = {each["model"] for each in view["replicas"]}
    coming = [name for name, model in models.items() if model["state"] != "unloaded" and name not in have_replicas]
    entries = [
        *(_entry(each["model"], models, contexts) | _of_replica(each) for each in view["replicas"]),
        *(_entry(name, models, contexts) for name in coming),
    ]
    return sorted(entries, key=lambda each: (order.get(each["model"], len(order)), each["replica"] or ""))


def _entry(name: str, models: dict[str, dict[str, Any]], contexts: dict[str, int | None]) -> dict[str, Any]:
    """Returns the entry of a model without a replica."""
    known = models.get(name, {})
    return {
        "model": name,
        "aliases": known.get("aliases", []),
        "state": known.get("state", "loaded"),
        "progress": known.get("progress"),
        "replica": None,
        "node": None,
        "up": False,
        "weights_bytes": None,
        "kv_bytes": None,
        "kv_bytes_max": None,
        "running": 0,
        "waiting": 0,
        "tokens_per_s": None,
        "idle_s": None,
        "context_tokens": contexts.get(name),
        "folder": None,
    }


def _of_replica(each: dict[str, Any]) -> dict[str, Any]:
    """Returns what a replica adds to its model's entry."""
    return {
        "replica": each["id"],
        "node": each["node"] or None,
        "up": each["up"],
        "weights_bytes": each["weights_bytes"],
        "kv_bytes": each["memory_bytes"],
        "kv_bytes_max": each["memory_bytes_max"],
        "running": each["running"],
        "waiting": each["waiting"],
        "tokens_per_s": each["tokens_per_s"],
        "idle_s": each["idle_s"],
        "folder": each["folder"],
    }
