"""`satchel promote`: makes this machine the head of the cluster that it was in, after the head was lost.

Its home has the agents that lived here or have a copy here. Config, keys and the endpoint's certificate are those of
the last takeover state that the head sent. The other machines know this machine's key, and find it at the same join
port as the former head's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ....cluster.bring_up.ports import check_port_free
from ....cluster.config.config import Config, Model, parse_config
from ....cluster.config.nodes import Node
from ....cluster.connection import find_cluster
from ....cluster.errors import ClusterError, HomeInUse, NotRunning
from ....cluster.home import Home, prepare_home, write_private
from ....cluster.keys import read_keys
from ....cluster.node_keeper import find_keeper
from ....cluster.processes import ProcessMark
from ....cluster.trust.admission import knock
from ....cluster.trust.invitations import Membership, remembered
from ....cluster.trust.members import Member, Members, keep_members
from ....cluster.trust.takeover_state import TakeoverState, kept_takeover_state, ways_back
from .service import end_process

Say = Callable[[str], None]

LEAVE_S = 40.0


def promote(home: Home, *, listen: str | None, force: bool, say: Say) -> Path:
    """Prepares the home to lead the cluster. Returns the config to serve.

    Args:
        listen: the endpoint's address; None replaces the head's address with this machine's.
        force: whether to do it even if the head answers.

    Raises:
        ClusterError: this machine was in no cluster, has no takeover state yet, or the head answers.
        HomeInUse: a server runs on the home.
        PortInUse: the join port is in use here.
    """
    last, found = remembered(home), kept_takeover_state(home)
    if last is None:
        raise ClusterError("this machine has joined no cluster, so there is none that it could lead")
    if found is None or not found[0].config:
        raise ClusterError(
            f"the head at {last.join_server} has not told this machine yet what it needs to lead the cluster, or "
            "this machine has left it or was removed"
        )
    # Another machine may have been promoted already.
    heads = (way.join_server for way in ways_back(home, last) if knock(way.join_server) == "open")
    if not force and (leads := next(heads, None)) is not None:
        raise ClusterError(
            f"the head at {leads} answers: end it there with `satchel down`, or lead a second cluster with --force"
        )
    _end_node(home, say)
    takeover_state = found[0]
    config = promoted_config(takeover_state, last, listen)
    check_port_free(config.machines[0].address, config.control_port)
    _take_over(home, takeover_state, last, config)
    agents = "agents that live here or have a copy here"
    say(f"{last.name} is to lead the cluster in place of {takeover_state.head}: with its keys, and the {agents}")
    return home.promoted_config_file


def promoted_config(takeover_state: TakeoverState, last: Membership, listen: str | None) -> Config:
    """Returns the config of the cluster with this machine as its head: without the lost head, with the other machines
    of the config, and with the join port at which they look for the head."""
    before = parse_config(takeover_state.config, source="the head's config")
    named = {node.name: node for node in before.nodes}
    own = replace(named.get(last.name, Node(name=last.name)), address=last.address, ssh=None)
    others = [node for node in before.nodes[1:] if node.name not in (last.name, takeover_state.head)]
    own_listen = before.endpoint.listen
    if own_listen == before.machines[0].address and not before.endpoint.listens_everywhere:
        own_listen = last.address
    endpoint = replace(before.endpoint, listen=listen or own_listen)
    kept = {own.name, *(node.name for node in others)}
    models = tuple(_without_lost(model, kept) for model in before.models)
    port = int(last.join_server.rpartition(":")[2])
    return replace(before, nodes=(own, *others), endpoint=endpoint, models=models, control_port=port)


def _without_lost(model: Model, kept: set[str]) -> Model:
    """Returns the model with those of its nodes that are left; if none of them is, it may run on all nodes."""
    return replace(model, nodes=tuple(name for name in model.nodes if name in kept))


def _end_node(home: Home, say: Say) -> None:
    """Ends the node that runs on the home. If a head answers, the node hands its agents over first; else they stay in
    the home."""
    if (keeper := find_keeper(home)) is not None:
        say(f"Ending the node {keeper.name} of the cluster at {keeper.join_server}")
        end_process(keeper.mark, LEAVE_S)
    try:
        record = find_cluster(home)
    except NotRunning:
        return
    if not record.joined:
        raise HomeInUse(f"{home.root} leads a cluster already (process {record.pid})")
    say(f"Ending the node {record.node}, which the head had started")
    end_process(ProcessMark(record.pid, record.pid_created_s), LEAVE_S)


def _take_over(home: Home, takeover_state: TakeoverState, last: Membership, config: Config) -> None:
    prepare_home(home)
    if takeover_state.keys is not None:
        if read_keys(home) is not None and home.keys_file.read_text(encoding="utf-8") != takeover_state.keys:
            # Keys of a cluster that this home led before.
            home.keys_file.replace(home.keys_file.with_name(f"keys-{int(time.time())}.json"))
        write_private(home.keys_file, takeover_state.keys)
    if takeover_state.certificate and config.endpoint.tls is not None:
        write_private(home.endpoint_certificate_file, takeover_state.certificate)
        write_private(home.endpoint_key_file, takeover_state.certificate_key)
        files = {"certificate": str(home.endpoint_certificate_file), "key": str(home.endpoint_key_file)}
        tls = replace(config.endpoint.tls, **files)
        config = replace(config, endpoint=replace(config.endpoint, tls=tls))
    others = [
        each for each in takeover_state.members.admitted.values() if each.name not in (last.name, takeover_state.head)
    ]
    # The former head may come back as a node.
    lost = Member(takeover_state.head, last.join_server.rpartition(":")[0].strip("[]"), last.fingerprint)
    known = {each.fingerprint: each for each in (lost, *others)}
    keep_members(home, Members(known, takeover_state.members.removed))
    write_private(home.former_authorities_file, takeover_state.authorities)
    # JSON is YAML.
    write_private(home.promoted_config_file, json.dumps(asdict(config), indent=2, default=str) + "\n")
