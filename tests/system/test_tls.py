"""`satchel serve` with HTTPS and a key, as its users meet it: the certificate that it made for itself, and then another
that takes its place while it runs."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, DefaultHttpxClient, OpenAI

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.home import Home
from tests.authority import authority, key_pem, write_pair
from tests.system.serving import COMMAND, RECALL, serving

QUESTION: list[Any] = [{"role": "user", "content": "Remember: the code of ada is 1815."}]

CLIENT = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
messages = [{"role": "user", "content": "Remember: the code of ada is 1815."}]
answer = client.chat.completions.create(model="satchel/recall", messages=messages, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices))
"""


@dataclass
class Running:
    home: Home
    port: int
    key: str
    said: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


def satchel(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments, "--home", str(home.root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that listens to everybody, with a certificate of `satchel cert` and a key of `satchel keys create`."""
    home, port = Home(tmp_path_factory.mktemp("home")), free_port()
    made = json.loads(satchel(home, "cert", "--json").stdout)
    key = satchel(home, "keys", "create", "ann").stdout.strip()
    tls = {"certificate": made["certificate"], "key": made["key"]}
    config = home.root / "config.yaml"
    config.write_text(json.dumps({"models": [RECALL], "endpoint": {"listen": "0.0.0.0", "port": port, "tls": tls}}))
    with serving(home.root, "--config", str(config)):
        yield Running(home, port, key, (home.root / "output").read_text())


def test_it_says_how_it_is_reached(running: Running):
    certificate = running.home.endpoint_certificate_file
    assert f"Ready: {running.url}/v1" in running.said
    assert f"curl --cacert {certificate} {running.url}/v1/chat/completions" in running.said


def test_the_official_client_trusts_it_by_its_file(running: Running):
    environment = {**os.environ, "SSL_CERT_FILE": str(running.home.endpoint_certificate_file)}
    command = [sys.executable, "-c", CLIENT, f"https://localhost:{running.port}/v1", running.key]
    for trusts in (True, False):
        if not trusts:
            del environment["SSL_CERT_FILE"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert (run.stdout.strip() == "Noted.") == trusts, run.stderr
        assert ("CERTIFICATE_VERIFY_FAILED" in run.stderr) == (not trusts)


def test_whole_answers_need_a_key(running: Running):
    trusts = ssl.create_default_context(cafile=str(running.home.endpoint_certificate_file))
    with DefaultHttpxClient(verify=trusts, trust_env=False) as http:
        client = OpenAI(base_url=f"{running.url}/v1", api_key=running.key, max_retries=0, http_client=http)
        answer = client.chat.completions.create(model="satchel/recall", messages=QUESTION)
        assert answer.choices[0].message.content == "Noted."
        for wrong in ("none", f"{running.key[:-1]}{'A' if running.key[-1] != 'A' else 'B'}"):
            with pytest.raises(AuthenticationError) as refused:
                client.with_options(api_key=wrong).models.list()
            assert refused.value.status_code == 401 and refused.value.code == "invalid_api_key"
    with httpx.Client(verify=trusts, trust_env=False) as http:
        assert http.get(f"{running.url}/v1/models").status_code == 401
        assert http.get(f"{running.url}/health").status_code == 200


def test_the_own_command_line_reaches_it(running: Running):
    status = satchel(running.home, "status", "--json")
    assert status.returncode == 0 and json.loads(status.stdout), status.stderr
    said = satchel(running.home, "chat", "Remember: the code of ada is 1815.")
    assert said.returncode == 0 and "Noted." in said.stdout, said.stderr


def test_a_certificate_of_an_authority_takes_its_place(running: Running):
    """It is for another name than this machine's own, so that only who knows it can trust it here."""
    root = authority()
    issued = root.intermediate().issue(["chat.example.org"])
    write_pair(running.home.tls, issued.chain, key_pem(issued.key), name="endpoint")
    ends = time.monotonic() + 60
    while running.home.shown_certificate_file.read_text() != issued.pem:
        assert time.monotonic() < ends
        time.sleep(0.1)
    status = satchel(running.home, "status", "--json")
    assert status.returncode == 0 and json.loads(status.stdout), status.stderr
    trusts = ssl.create_default_context(cadata=root.pem)
    bearer = {"Authorization": f"Bearer {running.key}"}
    with httpx.Client(verify=trusts, trust_env=False, headers=bearer) as http:
        # As if the network knew the name.
        options: dict[str, Any] = {"headers": {"Host": "chat.example.org"}}
        options["extensions"] = {"sni_hostname": "chat.example.org"}
        assert http.get(f"{running.url}/v1/models", **options).status_code == 200
    with httpx.Client(verify=trusts, trust_env=False) as http, pytest.raises(httpx.ConnectError, match="not valid for"):
        http.get(f"{running.url}/v1/models")
    # Of the same authority, but another: not what the command line trusts.
    other = root.intermediate().issue(["127.0.0.1"])
    running.home.shown_certificate_file.write_text(other.chain)
    refused = satchel(running.home, "status")
    assert refused.returncode == 1 and "certificate verify failed" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path):
    tls = authority().issue(["a.example"], days=(-9, -1)).write(tmp_path)
    config = tmp_path / "config.yaml"
    endpoint = {"port": free_port(), "tls": {"certificate": tls.certificate, "key": tls.key}}
    config.write_text(json.dumps({"models": [RECALL], "endpoint": endpoint}))
    home = Home(tmp_path / "home")
    for command in (("serve", "--config", str(config)), ("up", str(config))):
        run = satchel(home, *command)
        assert run.returncode == 1 and "Starting" not in run.stdout
        (line,) = run.stderr.splitlines()
        assert line.startswith(f"satchel: the certificate {tls.certificate} expired on ")
        assert not home.session_file.exists()
