"""Several hosts on one machine: network namespaces with an address each, on one bridge. Linux and root only.

Every link can be cut and healed, and slowed down. A stand-in for the ssh client runs a command in the host's namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from satchel.actors.kv_store.replication.peers import secondary_nodes
from satchel.cluster.processes import ProcessMark

LISTEN = "0A"
"""The state of a socket that accepts connections, as Linux writes it."""

SSH = """#!/bin/sh
# Called as `ssh -o OPTION... HOST -- COMMAND`.
while [ "$1" = "-o" ]; do shift 2; done
host=$1; shift 2
exec ip netns exec "$host" sh -c "$*"
"""


def likely() -> bool:
    """Whether this machine has what hosts need, unless it forbids them."""
    return sys.platform.startswith("linux") and os.getuid() == 0 and shutil.which("ip") is not None


def missing() -> str | None:
    """Why there can be no hosts here, None where there can."""
    if not likely():
        return "network namespaces need Linux, root and iproute2"
    probe = f"st{os.getpid()}"
    for words in (["netns", "add", probe], ["link", "add", probe, "type", "bridge"]):
        made = subprocess.run(["ip", *words], capture_output=True, text=True)
        if made.returncode:
            subprocess.run(["ip", "netns", "del", probe], capture_output=True)
            return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "link", "del", probe], check=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@dataclass(frozen=True)
class Host:
    """One namespace; `link` is its end of the cable on the bridge."""

    name: str
    address: str
    link: str

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs there."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def heal(self) -> None:
        _ip("link", "set", self.link, "up")

    def sleep(self) -> list[int]:
        """Stops every process, and nothing answers on the network, as with a closed lid. Returns who is to wake."""
        self.cut()
        pids = self.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def wake(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.heal()

    def slow(self, mbit_s: int) -> None:
        """Bound what goes to and from the host."""
        shaping = ["root", "tbf", "rate", f"{mbit_s}mbit", "burst", "256k", "latency", "50ms"]
        subprocess.run(["tc", "qdisc", "replace", "dev", self.link, *shaping], check=True)
        subprocess.run(self.command("tc", "qdisc", "replace", "dev", "eth0", *shaping), check=True)

    def kill_all(self) -> None:
        """Send SIGKILL to every process of the host, and to those that they still start meanwhile."""
        ends = time.monotonic() + 10
        while pids := self.pids():
            assert time.monotonic() < ends, f"processes {pids} of {self.name} cannot be ended"
            for pid in pids:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        # A killed process of many threads may have its sockets for a moment longer.
        wait_until(lambda: not self.listens(), 10)

    def listens(self) -> bool:
        """Whether anybody accepts connections there."""
        return bool(self._listeners("/proc/net/tcp"))

    def open_ports(self) -> set[int]:
        """Ports at which processes accept connections on all addresses of the host."""
        found = self._listeners("/proc/net/tcp", "/proc/net/tcp6")
        return {int(port, 16) for address, _, port in (each.partition(":") for each in found) if not int(address, 16)}

    def _listeners(self, *tables: str) -> list[str]:
        """Where connections are accepted, as Linux writes it: ADDRESS:PORT, in hexadecimal."""
        found = subprocess.run(self.command("cat", *tables), capture_output=True, text=True, check=True)
        rows = [line.split() for line in found.stdout.splitlines()]
        return [row[1] for row in rows if row[3] == LISTEN]

    def pids(self) -> list[int]:
        """Its processes, by their ids in the machine."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [pid for pid in map(int, found.stdout.split()) if ProcessMark.of(pid) is not None]


def stand_in_ssh(folder: Path) -> Path:
    """The folder with a stand-in for the ssh client, to be put at the head of a PATH."""
    programs = folder / "programs"
    programs.mkdir(parents=True)
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    return programs


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts with a network of their own, which this process can reach; nothing of them is left afterwards."""
    number, bridge = _own_network()
    made: list[Host] = []
    try:
        _ip("addr", "add", f"10.213.{number}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index in range(count):
            host = Host(f"s{number}-mac{index}", f"10.213.{number}.{index + 1}", f"{bridge}x{index}")
            _ip("netns", "add", host.name)
            made.append(host)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            host.kill_all()
            subprocess.run(["ip", "netns", "del", host.name], check=False)
            # A namespace lives on as long as one of its connections does; the cable need not.
            subprocess.run(["ip", "link", "del", host.link], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False)
    wait_until(lambda: not _left(number, bridge), 10)


def _own_network() -> tuple[int, str]:
    """The number of a network that nobody else on this machine uses, and its bridge, which holds the number."""
    for number in range(20, 220):
        bridge = f"sb{number}"
        if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], capture_output=True).returncode == 0:
            return number, bridge
    raise AssertionError("no network is free; perhaps tests that were killed have left theirs: `ip link`")


def _left(number: int, bridge: str) -> list[str]:
    """What is still there of a network: namespaces and links."""
    views = (["netns"], ["-br", "link"])
    said = "".join(subprocess.run(["ip", *words], capture_output=True, text=True).stdout for words in views)
    return [line for line in said.splitlines() if line.startswith((f"s{number}-", bridge))]


@dataclass(frozen=True)
class Said:
    """An answer, where it came from, and how many tokens its prompt had and were found."""

    text: str
    node: str
    prompt: int
    cached: int


class Talk:
    """The cluster as its users see it, over HTTP."""

    def __init__(self, url: str, key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False, headers=headers)

    def body(self, text: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40, **more}

    def post(self, agent: str, text: str, **more: Any) -> httpx.Response:
        """Say something to an agent, which remembers what was said before."""
        headers = {"X-Agent-ID": agent, "X-Agent-Continue": "1"}
        return self.http.post("/v1/chat/completions", json=self.body(text, **more), headers=headers)

    def ask(self, agent: str, text: str, **more: Any) -> Said:
        answer = self.post(agent, text, **more)
        assert answer.status_code == 200, answer.text
        data = answer.json()
        usage = data["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        said = data["choices"][0]["message"]["content"]
        return Said(said, answer.headers["x-satchel-node"], usage["prompt_tokens"], cached)

    def tell_codes(self, agent: str, codes: dict[str, str]) -> int:
        """Tell an agent some codes, a hundred tokens each. Returns how many tokens it remembers then."""
        for name, code in codes.items():
            others = " ".join(f"The code of {name}{letter} is {int(code) - i}." for i, letter in enumerate("xyz", 1))
            self.ask(agent, f"The code of {name} is {code}. {others}")
        return self.http.get(f"/v1/agents/{agent}").json()["tokens"]

    def stream(self, agent: str, text: str, during: Callable[[int], None], **more: Any) -> str:
        """The whole text of a streamed answer; `during` is called after each piece with their number."""
        said, pieces = "", 0
        headers = {"X-Agent-ID": agent, "X-Agent-Continue": "1"}
        body = self.body(text, stream=True, **more)
        with self.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    said += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    pieces += 1
                    during(pieces)
        assert line == "data: [DONE]" or not line
        return said

    def nodes(self) -> dict[str, bool]:
        """Whether each node is up, by name."""
        answer = self.http.get("/v1/cluster?agents=0")
        assert answer.status_code == 200, answer.text
        return {node["name"]: node["up"] for node in answer.json()["nodes"]}

    def answering(self) -> set[str]:
        """Nodes on which a replica answers; a node is up before its replicas have loaded."""
        replicas = self.http.get("/v1/cluster?agents=0").json()["replicas"]
        return {replica["node"] for replica in replicas if replica["up"]}

    def where(self, agent: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/cluster/agents/{agent}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def settled(self, agent: str, home: str, copies: list[str]) -> dict[str, Any]:
        """Where the agent is, once that is so: a copy that a busy machine did not make in time is made again."""
        wait_until(lambda: ((place := self.where(agent))["home"], place["copies"]) == (home, copies), 20)
        return self.where(agent)

    def agents(self) -> list[str]:
        return [each["id"] for each in self.http.get("/v1/agents?limit=100").json()["data"]]


def named(stem: str, home: str, nodes: list[str]) -> str:
    """A name of which the agent begins its life on `home`."""
    return next(
        name for number in range(1000) if secondary_nodes(f"default/{(name := f'{stem}{number}')}", nodes, 1) == [home]
    )


def wait_until(true: Callable[[], bool], timeout_s: float) -> None:
    ends = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < ends, f"not within {timeout_s:g} s"
        time.sleep(0.2)


def holders(folder: Path, word: str) -> Iterator[Path]:
    """Files with that word in them."""
    for path in folder.rglob("*"):
        # One may be gone before it is read.
        with suppress(OSError):
            if path.is_file() and word.encode() in path.read_bytes():
                yield path
