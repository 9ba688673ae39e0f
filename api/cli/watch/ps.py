"""`satchel ps`: the models that run, where, and how busy they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ....cluster.home import Home
from ..options import HomeOption, JsonOption, chosen_home
from ..printing import print_json
from ..tables import duration, size, table
from ..views import client, get_json

_ANSWER_S = 15.0


def ps(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the models that run: size, node, sequences, idle time and context."""
    found = running_models(chosen_home(home))
    if json:
        print_json(found)
        return
    shown = table("model", "node", numbers=("size", "KV", "sequences", "idle", "context"))
    for each in found:
        busy = each["running"] or each["waiting"]
        waiting = f" + {each['waiting']} waiting" if each["waiting"] else ""
        shown.add_row(
            Text(each["model"]),
            Text(each["node"] or ""),
            size(each["weights_bytes"]),
            size(each["kv_bytes"]),
            f"{each['running']}{waiting}" if each["up"] else "",
            "does not answer" if not each["up"] else "" if busy else duration(each["idle_s"]),
            "" if each["context_tokens"] is None else f"{each['context_tokens']:,}",
        )
    Console(highlight=False).print(shown)


def running_models(home: Home) -> list[dict[str, Any]]:
    """Returns an entry for each replica, by model in the config's order.

    Raises:
        NotRunning: no server runs on the home, or it does not answer.
    """
    with client(home, timeout_s=_ANSWER_S) as session:
        models = get_json(session, "/v1/models").get("data", [])
        replicas = get_json(session, "/v1/cluster?agents=0").get("replicas", [])
    contexts = {model["id"]: model.get("max_model_len") for model in models}
    order = {name: index for index, name in enumerate(contexts)}
    return [
        {
            "model": each["model"],
            "replica": each["id"],
            "node": each["node"] or None,
            "up": each["up"],
            "weights_bytes": each.get("weights_bytes"),
            "kv_bytes": each["memory_bytes"],
            "kv_bytes_max": each["memory_bytes_max"],
            "running": each["running"],
            "waiting": each["waiting"],
            "tokens_per_s": each["tokens_per_s"],
            "idle_s": each.get("idle_s", 0.0),
            "context_tokens": contexts.get(each["model"]),
            "folder": each.get("folder"),
        }
        for each in sorted(replicas, key=lambda each: (order.get(each["model"], len(order)), each["id"]))
    ]
