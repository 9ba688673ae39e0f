"""What macOS does to a server unless it is asked not to: it sleeps, limits the GPU's memory, and blocks the network.

Satchel asks macOS's own programs. A program that is missing, fails or says something unknown leaves a check out.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from ..config.nodes import Node
from ..environment import is_macos
from ..patches import ray_programs
from .check import Check

_GIB, _MIB = 2**30, 2**20
_ASK_S = 5.0
_CONNECT_S = 3.0
_SSH_PORT = 22
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"

LOCAL_NETWORK = (
    "allow it under System Settings > Privacy & Security > Local Network; for a service of launchd, which cannot ask, "
    "use `satchel install-service --daemon`"
)


def stay_awake(pid: int) -> subprocess.Popen[bytes] | None:
    """Keeps a Mac from falling asleep while a process runs, with macOS's `caffeinate`; the display may sleep.

    Args:
        pid: of the process. `caffeinate` ends by itself after it, even after `kill -9`.

    Returns:
        The process that keeps the Mac awake; None elsewhere, or if `caffeinate` cannot be started.
    """
    program = shutil.which("caffeinate") if is_macos() else None
    if program is None:
        return None
    try:
        return subprocess.Popen(
            [program, "-i", "-w", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None


def checks(node: Node, weights_bytes: int = 0, *, open_to_others: bool = False) -> list[Check]:
    """Returns what is to be said of this Mac; nothing on another system.

    Args:
        node: this machine, as the config names it.
        weights_bytes: the largest model's files, 0 if unknown.
        open_to_others: whether other machines can reach an endpoint here.
    """
    if not is_macos():
        return []
    found = [_sleep(node.keep_awake), _gpu_memory(weights_bytes), _firewall(node, open_to_others), *_thunderbolt(node)]
    return [check for check in found if check is not None]


def _sleep(keeps_awake: bool) -> Check | None:
    minutes = re.search(r"^\s*sleep\s+(\d+)", asked("pmset", "-g"), re.MULTILINE)
    if minutes is None:
        return None
    if minutes[1] == "0":
        return Check("sleep", "ok", "this Mac does not fall asleep by itself")
    found = f"this Mac falls asleep after {minutes[1]} minute{'s' * (minutes[1] != '1')} without a user"
    if keeps_awake:
        return Check("sleep", "ok", f"{found}; a running server keeps it awake, but not with its lid closed")
    return Check("sleep", "warn", found, "set `keep_awake: true` for its node, or `sudo pmset -c sleep 0`")


def _gpu_memory(weights_bytes: int) -> Check | None:
    memory, limit = _number("hw.memsize"), _number("iogpu.wired_limit_mb")
    if memory is None or limit is None:
        return None
    # Without a limit of its own macOS gives the GPU two thirds of up to 36 GiB, and three quarters of more.
    usable = limit * _MIB or memory * (2 / 3 if memory <= 36 * _GIB else 3 / 4)
    found = f"the GPU may use {usable / _GIB:.0f} of {memory / _GIB:.0f} GiB"
    if weights_bytes < usable:
        return Check("gpu memory", "ok", found)
    # 8 GiB stay for macOS and other programs.
    most = (memory - 8 * _GIB) // _MIB
    found += f", and the largest model has {weights_bytes / _GIB:.0f} GiB"
    if most * _MIB <= weights_bytes:
        return Check("gpu memory", "warn", found, "use a smaller model or a quantization with fewer bits")
    return Check("gpu memory", "warn", found, f"sudo sysctl iogpu.wired_limit_mb={most} (until the next restart)")


def _firewall(node: Node, open_to_others: bool) -> Check | None:
    said = asked(FIREWALL, "--getglobalstate")
    if "State = 0" in said or "disabled" in said:
        return Check("firewall", "ok", "macOS's firewall is off")
    if "State = 2" in said:
        found = "macOS's firewall blocks all incoming connections"
        return Check("firewall", "warn", found, f"sudo {FIREWALL} --setblockall off")
    if "State = 1" not in said and "enabled" not in said:
        return None
    programs = _listening(alone=node.is_loopback)
    rules = {program: asked(FIREWALL, "--getappblocked", program) for program in programs}
    names = _named(programs)
    if all("permitted" in rule for rule in rules.values()):
        return Check("firewall", "ok", f"macOS's firewall lets {names} accept connections")
    allow = {program: f"sudo {FIREWALL} --unblockapp {shlex.quote(program)}" for program in programs}
    if refused := [program for program, rule in rules.items() if "block" in rule and "not" not in rule]:
        mend = "; ".join(allow[program] for program in refused)
        return Check("firewall", "warn", f"macOS's firewall refuses connections to {_named(refused)}", mend)
    found = f"macOS's firewall is on: it asks about connections to {names}, and refuses them until you allow it"
    if node.is_loopback and not open_to_others:
        return Check("firewall", "ok", f"{found}; connections of this Mac itself are not asked about")
    asks = [program for program, rule in rules.items() if "permitted" not in rule]
    add = "; ".join(f"sudo {FIREWALL} --add {shlex.quote(program)}; {allow[program]}" for program in asks)
    return Check("firewall", "warn", found, f"answer its questions, or for a service, which nobody sees: {add}")


def _listening(*, alone: bool) -> list[str]:
    """Returns the programs that others connect to, as the firewall knows them. Where Python is a framework (python.org,
    Homebrew), its command only starts the one in an application, `Python.app`.

    Args:
        alone: whether Ray has no other machines.
    """
    try:
        python = psutil.Process().exe()
    except psutil.Error:
        python = os.path.realpath(sys.executable)
    application = re.match(r".*\.app(?=/Contents/MacOS/)", python)
    return [application[0] if application else python, *([] if alone else ray_programs())]


def _named(programs: Sequence[str]) -> str:
    return ", ".join(Path(program).name for program in programs)


def _thunderbolt(node: Node) -> list[Check]:
    """Returns checks of bridges of Thunderbolt cables: each needs a fixed address, and its node a link with it."""
    links = {link.address for link in node.links}
    own, checks = psutil.net_if_addrs(), []
    for port, device in hardware_ports():
        if not port.startswith("Thunderbolt Bridge"):
            continue
        found = [each.address for each in own.get(device, []) if each.family == socket.AF_INET]
        for address in found:
            checks.append(_bridge(port, device, address, known=address in links, alone=node.is_loopback))
    for link in node.links:
        if not any(link.address == each.address for addresses in own.values() for each in addresses):
            found = f"{link.address}, a link of {node.name}, is no address of this Mac now"
            checks.append(Check("link", "warn", found, "plug the cable in, or correct `links` in the config"))
    return checks


def _bridge(port: str, device: str, address: str, *, known: bool, alone: bool) -> Check:
    name = f"thunderbolt ({device})"
    if ipaddress.ip_address(address).is_link_local:
        # Such an address may be another one after the next start.
        fixed = f'networksetup -setmanual "{port}" 10.10.10.1 255.255.255.0'
        mend = f"give each Mac a fixed one, here for example: {fixed}; on the next 10.10.10.2"
        return Check(name, "warn", f"its address {address} is self-assigned", mend)
    if known or alone:
        return Check(name, "ok", f"its address is {address}")
    mend = f"give its node this link in the config: links: [{{address: {address}, kind: thunderbolt}}]"
    return Check(name, "warn", f"its address is {address}, and KV does not use it", mend)


def reach(nodes: Sequence[Node], port: int = _SSH_PORT) -> list[Check]:
    """Tries connections to all of `nodes` at once, the machines of the cluster but this one, for 3 s at most.

    A refused connection is a machine that is there.
    """
    with ThreadPoolExecutor(max(1, len(nodes))) as threads:
        return list(threads.map(lambda node: _reached(node, port), nodes))


def _reached(node: Node, port: int) -> Check:
    name = f"network to {node.name}"
    try:
        socket.create_connection((node.address, port), _CONNECT_S).close()
    except ConnectionRefusedError:
        pass
    except OSError as error:
        said = f"{node.address}: {error.strerror or 'no answer'}"
        blocked = error.errno == errno.EHOSTUNREACH and is_macos()
        advice = LOCAL_NETWORK if blocked else "switch the machine on, and check its address and the network"
        return Check(name, "warn", said, advice)
    return Check(name, "ok", f"{node.address} answers")


def _number(name: str) -> int | None:
    """Returns a number of `sysctl`."""
    said = asked("sysctl", "-n", name).strip()
    return int(said) if said.isdecimal() else None


def hardware_ports() -> list[tuple[str, str]]:
    """Returns this Mac's network ports as macOS calls them, with their devices: `("Thunderbolt Bridge", "bridge0")`."""
    return re.findall(
        r"^Hardware Port: (.+)\nDevice: (\S+)", asked("networksetup", "-listallhardwareports"), re.MULTILINE
    )


def asked(*command: str) -> str:
    """Returns what one of macOS's programs prints, "" if it cannot say."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, errors="replace"
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
