"""The page's files: who gets them, and that a browser runs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from satchel.api import page
from satchel.api.app import create_app
from satchel.cluster.home import Home, prepare_home
from satchel.cluster.keys import KeyRing, create_key

STATIC = Path(page.__file__).parent / "static"
PAGES = ("index.html", "docs.html")
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Tags(HTMLParser):
    """A page's tags with their attributes, and the text within scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "style"):
            self.inline += data.strip()

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


async def test_browsers_get_the_page_and_programs_a_greeting(client: httpx.AsyncClient):
    shown = await client.get("/", headers=BROWSER)
    assert shown.headers["content-type"] == "text/html; charset=utf-8" and "<title>Satchel</title>" in shown.text
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        greeting = await client.get("/", headers=accept)
        assert greeting.text == "Satchel is running" and greeting.headers["vary"] == "Accept"
    assert (await client.head("/")).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/page/page.js", "/page/uPlot.iife.min.js"])
async def test_a_browser_runs_only_files_of_this_server(client: httpx.AsyncClient, path: str):
    answer = await client.get(path, headers=BROWSER)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy) and "http" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_script_or_style_within_and_nothing_from_elsewhere(name: str):
    found = Tags((STATIC / name).read_text())
    assert found.inline == ""
    for tag, attributes in found.tags:
        assert not any(given == "style" or given.startswith("on") for given in attributes), (tag, attributes)
        for given in ("src", "href"):
            assert (attributes.get(given) or "/").startswith(("/", "#")), (tag, attributes)


def test_every_script_imports_files_that_there_are_and_nothing_writes_html():
    names = {file.name for file in STATIC.rglob("*") if file.is_file()}
    for script in STATIC.glob("*.js"):
        text = script.read_text()
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= names, script.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", text), (
            script.name
        )


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_a_page_names_is_there_and_every_control_has_a_name(name: str):
    found = Tags((STATIC / name).read_text())
    names = {file.name for file in STATIC.rglob("*") if file.is_file()}
    for _, attributes in found.tags:
        for given in ("src", "href"):
            if (path := attributes.get(given) or "").startswith("/page/"):
                assert path.removeprefix("/page/") in names
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    kinds = [tag for tag, _ in found.tags]
    assert kinds.count("main") == kinds.count("h1") == 1 and {"header", "nav"} <= set(kinds)


def test_the_files_are_small_and_the_library_comes_with_its_licence():
    sizes = {file.name: file.stat().st_size for file in STATIC.rglob("*") if file.is_file()}
    assert sum(sizes.values()) < 150_000
    assert "MIT" in (STATIC / "vendor" / "uPlot.LICENSE.txt").read_text()


async def test_an_unchanged_file_is_not_sent_again(client: httpx.AsyncClient):
    first = await client.get("/page/page.css")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/page/page.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["nothing.js", "routes.py", "..%2froutes.py", "%2e%2e/%2e%2e/app.py", "vendor/uPlot.LICENSE.txt"]
)
async def test_only_files_of_the_page_are_sent(client: httpx.AsyncClient, name: str):
    assert (await client.get(f"/page/{name}")).status_code == 404


async def test_the_page_needs_no_key_and_what_it_asks_does(backend, config, tmp_path: Path):
    home = Home(tmp_path)
    prepare_home(home)
    secret = create_key(home, "ann")[1]
    transport = httpx.ASGITransport(create_app(backend, config, keys=KeyRing(home, required=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/", "/docs", "/page/page.js"):
            assert (await client.get(path, headers=BROWSER)).status_code == 200
        for path in ("/openapi.json", "/v1/cluster/events", "/v1/requests", "/pages", "/docs/x"):
            assert (await client.get(path, headers=BROWSER)).status_code == 401
        refused = await client.get("/v1/models", headers={"Authorization": f"Bearer {secret}x"})
        assert refused.status_code == 401 and "not known" in refused.json()["error"]["message"]


async def test_no_page_loads_from_a_cdn(client: httpx.AsyncClient):
    assert (await client.get("/redoc")).status_code == 404
    assert "cdn" not in (await client.get("/docs")).text
