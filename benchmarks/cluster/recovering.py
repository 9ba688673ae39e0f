"""A node is killed: how long its stream stands still, and when its agent answers again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from satchel.cluster.bring_up.ports import free_port
from tests.system.hosts import hosts

from ..parts import Budget, ResultTable, Say, median
from ..programs import ROOT
from .server import ClusterClient, ClusterStream, kill, node_processes, resumed_s, serving, wait_for

CONFIG = ROOT / "configs" / "two-nodes-local.yaml"
HEAD, OTHER = "mac0", "mac1"
FACT, NUMBERS = "Remember: the code of heron is 2002.", "Say the numbers from one to ninety-nine."
QUESTION, CODE = "What is the code of heron?", "2002"
ATTEMPTS = 20
STREAM_TOKENS, ANSWER_TOKENS, KILLED_AFTER = 600, 40, 30


@dataclass
class Kills:
    """Seconds from each kill.

    Attributes:
        next_token: of the stream that the node was sending.
        first_token, whole: of the agent's next answer, which is asked for as soon as the node is dead.
        reused: of the next answer's prompt.
    """

    next_token: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)


class TwoNodes:
    """The two nodes, of which one is killed again and again."""

    def __init__(self, client: ClusterClient, server_pid: int) -> None:
        self._client, self._server_pid = client, server_pid
        self._named = hosts.named
        self._pid = 0
        self.undisturbed = ""

    def prepare(self, name: str) -> tuple[str, list[int]]:
        """A new agent at home on the node, with a copy on the head; and the node's processes."""
        self._pid = wait_for(self._other_pid, f"{OTHER} answers")
        for attempt in range(ATTEMPTS):
            agent = self._named(f"{name}{attempt}", OTHER, [HEAD, OTHER])
            told = self._client.say(agent, FACT, ANSWER_TOKENS)
            if told.node == OTHER:
                break
            # Its store answers before the router has heard of its replica.
            time.sleep(1.0)
        else:
            raise RuntimeError(f"{agent} was answered on {told.node}")
        wait_for(lambda: self._client.copies(agent) == [HEAD], f"{agent} has a copy", 30.0)
        return agent, node_processes(self._pid, self._server_pid)

    def in_a_stream(self, number: int, kills: Kills) -> None:
        if not self.undisturbed:
            agent, _ = self.prepare("mirror")
            self.undisturbed = self._client.say(agent, NUMBERS, STREAM_TOKENS).text
        agent, pids = self.prepare(f"stream{number}x")
        killed = 0.0

        def during(pieces: int) -> None:
            nonlocal killed
            if pieces == KILLED_AFTER:
                killed = kill(pids)

        stream = self._client.say(agent, NUMBERS, STREAM_TOKENS, during)
        if stream.text != self.undisturbed:
            raise RuntimeError("the stream has another text than the one that nobody disturbed")
        kills.next_token.append(resumed_s(stream.arrivals, killed))

    def between_turns(self, number: int, kills: Kills) -> None:
        agent, pids = self.prepare(f"answer{number}x")
        killed = kill(pids)
        answer: ClusterStream = self._client.say(agent, QUESTION, ANSWER_TOKENS)
        if answer.node != HEAD or CODE not in answer.text:
            raise RuntimeError(f"{answer.node} said {answer.text!r}")
        kills.first_token.append(answer.arrivals[0] - killed)
        kills.whole.append(answer.arrivals[-1] - killed)
        kills.reused.append(answer.cached / answer.prompt)

    def _other_pid(self) -> int | None:
        """Of the node's replica; not the one that was killed."""
        pid = self._client.replica_pid(OTHER)
        return pid if pid != self._pid or self._pid_lives() else None

    def _pid_lives(self) -> bool:
        try:
            node_processes(self._pid, self._server_pid)
        except (OSError, RuntimeError):
            return False
        return True


def recovering(rounds: int, work: Path, budget: Budget, say: Say) -> ResultTable:
    """Two nodes on this machine, both kinds of kill in each round."""
    kills, port, home = Kills(), free_port(), work / "home"
    arguments = ["--config", str(CONFIG), "--port", str(port)]
    with (
        serving(arguments, home, [home / "nodes" / OTHER]) as server,
        ClusterClient(f"http://127.0.0.1:{port}") as client,
    ):
        place = TwoNodes(client, server.pid)
        for number in budget.rounds(rounds):
            place.in_a_stream(number, kills)
            say(f"  stream: the next token after {kills.next_token[-1]:.2f} s")
            place.between_turns(number, kills)
            say(f"  answer: the first token after {kills.first_token[-1]:.2f} s, whole after {kills.whole[-1]:.2f} s")
    return table(kills)


def table(kills: Kills) -> ResultTable:
    """The part; ways that nothing was measured of are left out."""
    part = ResultTable("A node is killed (kill -9 of all its processes), two nodes on one machine")
    ways: dict[str, Sequence[float]] = {
        "to the next token of its stream": kills.next_token,
        "to the first token of its agent's next answer": kills.first_token,
        "to the end of that answer": kills.whole,
    }
    for name, found in ways.items():
        if found:
            shown = {"median, s": median(found), "shortest, s": min(found), "longest, s": max(found)}
            part.rows.append({"from the kill": name, **shown, "times": len(found)})
    if not part.rows:
        part.notes.append("There was no time for a kill.")
    if kills.next_token:
        part.notes.append("Every stream had the text of one that nobody disturbed: nothing twice, nothing missing.")
    if kills.reused:
        part.notes.append(
            f"The next answers came from the other node and reused {100 * median(kills.reused):.0f}% of their "
            "prompts, of few tokens; the request was sent as soon as the node was dead."
        )
    return part
