"""A cluster of two nodes with keys, and a headless Chromium that shows its page.

The browser is the system's own; Playwright's package comes from an environment of its own (`make test-page`).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from satchel.cluster.bring_up.ports import free_port
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import create_key
from tests.system.hosts.hosts import wait_until
from tests.system.serving import RECALL, serving

VENV = Path(__file__).parents[2] / "build" / "page" / "venv"
NODES = ["mac0", "mac1"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMES_AND_GOES = {"load": "request", "aliases": ["poet"]}
WAIT_MS = 30_000

# Last, so that everything else comes from the environment of the tests.
sys.path += [str(folder) for folder in VENV.glob("lib/python*/site-packages")]


@dataclass
class World:
    home: Path
    url: str
    keys: dict[str, str]
    """By name: `default` and `root` are administrators', `bob` is not."""

    def ask(self, method: str, path: str, body: Any = None, key: str = "default") -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.keys[key]}"}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=60, trust_env=False)

    def view(self) -> dict[str, Any]:
        return self.ask("GET", "/v1/cluster").json()

    def whole(self) -> None:
        wait_until(lambda: {each["node"] for each in self.view()["replicas"] if each["up"]} == set(NODES), 90)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root, port = tmp_path_factory.mktemp("page"), free_port()
    home = Home(root)
    prepare_home(home)
    keys = {name: create_key(home, name, admin=name != "bob")[1] for name in ("default", "root", "bob")}
    config = {
        "models": [
            RECALL,
            {"name": "satchel/shapes", "source": "embedded:shapes", "nodes": ["mac0"]},
            {"name": "satchel/script", "source": "embedded:script", "nodes": ["mac0"], **COMES_AND_GOES},
        ],
        "nodes": [{"name": name} for name in NODES],
        "replication": 1,
        # Else the limits follow what other programs leave.
        "scheduling": {"memory_bytes_max": "2 GiB"},
    }
    (root / "config.yaml").write_text(json.dumps(config))
    with serving(root, "--config", str(root / "config.yaml"), "--port", str(port)):
        found = World(root, f"http://127.0.0.1:{port}", keys)
        found.whole()
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if find_spec("playwright") is None:
        pytest.skip("Playwright is not installed: make test-page")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"there is no {BROWSERS[0]} on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    with sync_playwright() as playwright:
        # As root, Chromium has no sandbox; it sees only this page.
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, world: World) -> Iterator[Callable[..., Any]]:
    """Opens the page in a tab of its own, with a key unless `key` is "". The page must make no error meanwhile."""
    contexts, errors = [], []

    def open_page(view: str = "chat", key: str = "default", **how: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **how})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if "Content Security Policy" in said.text else None)
        if key:
            context.add_init_script(f"sessionStorage.setItem('satchel-key', {world.keys[key]!r})")
        page.goto(f"{world.url}/#{view}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
