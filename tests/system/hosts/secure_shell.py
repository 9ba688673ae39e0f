"""A real sshd on the test's hosts, with keys of its own, and the real ssh client with a config that knows them."""

from __future__ import annotations

import shlex
import shutil
import socket
import stat
import subprocess
import time
from pathlib import Path

from .hosts import Host

SSHD = "/usr/sbin/sshd"
PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Sshd wants this folder, empty, and has no setting for it."""

PORT = 22

SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
CLIENT = """\
Host * !{stranger}
  IdentityFile {folder}/key
Host *
  User root
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {folder}/known_hosts
"""
STRANGER, IMPOSTOR, NOWHERE = "stranger", "impostor", "nowhere"
"""What the client's config calls a host that does not know its key, one that has another host key than is known, and
one that is not there."""


def missing() -> str | None:
    """Why there can be no sshd here, None where there can."""
    absent = [program for program in (SSHD, "ssh", "ssh-keygen") if shutil.which(program) is None]
    return f"{', '.join(absent)} missing: install OpenSSH's server and client" if absent else None


class SecureShell:
    """Put `programs` at the head of a PATH: its `ssh` is the real one, with a config of its own."""

    def __init__(self, folder: Path, hosts: list[Host]) -> None:
        folder.mkdir()
        self.programs = folder / "programs"
        self._server, self._log = folder / "sshd_config", folder / "log"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._made = not PRIVILEGE_SEPARATION.exists()
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        for name in ("host_key", "key", "strange_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
            subprocess.run(command, check=True)
        self._server.write_text(SERVER.format(folder=folder))
        kind, key, _ = (folder / "host_key.pub").read_text().split()
        _, other, _ = (folder / "strange_key.pub").read_text().split()
        known = [f"{host.address} {kind} {key}" for host in hosts] + [f"{IMPOSTOR} {kind} {other}"]
        (folder / "known_hosts").write_text("\n".join([*known, ""]))
        address = hosts[-1].address
        nowhere = address.rpartition(".")[0] + ".253"
        client = [f"Host {host.name}\n  HostName {host.address}" for host in hosts]
        client += [f"Host {STRANGER}\n  HostName {address}\n  IdentityFile {folder}/strange_key"]
        client += [f"Host {IMPOSTOR}\n  HostName {address}\n  HostKeyAlias {IMPOSTOR}"]
        client += [f"Host {NOWHERE}\n  HostName {nowhere}", CLIENT.format(folder=folder, stranger=STRANGER)]
        (folder / "ssh_config").write_text("\n".join(client))
        self._wrap_client(folder)

    def _wrap_client(self, folder: Path) -> None:
        """The client takes the user's config from the user's real home, whatever HOME says."""
        self.programs.mkdir()
        wrapped, real = self.programs / "ssh", shutil.which("ssh")
        assert real is not None
        wrapped.write_text(f'#!/bin/sh\nexec {real} -F {shlex.quote(str(folder / "ssh_config"))} "$@"\n')
        wrapped.chmod(wrapped.stat().st_mode | stat.S_IXUSR)

    def start(self, host: Host) -> None:
        """Start sshd on a host, again where the host was killed, and wait until it answers."""
        if (before := self._running.pop(host.name, None)) is not None:
            before.wait(10)
        with self._log.open("ab") as log:
            command = host.command(SSHD, "-D", "-e", "-f", str(self._server))
            process = self._running[host.name] = subprocess.Popen(command, stdout=log, stderr=log)
        ends = time.monotonic() + 20
        while True:
            assert process.poll() is None, self._log.read_text()
            try:
                socket.create_connection((host.address, PORT), 1.0).close()
                return
            except OSError:
                assert time.monotonic() < ends, f"sshd on {host.name} does not answer"
                time.sleep(0.05)

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
            process.wait(10)
        if self._made:
            PRIVILEGE_SEPARATION.rmdir()
