"""The chat on the page: answers, memory, pictures; with the keyboard, on a phone, in the dark."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.worlds.pictures import red_circle

from .conftest import World

pytestmark = pytest.mark.page

VIEWS = ("chat", "cluster", "agents", "requests", "models")


def say(page: Any, text: str) -> Any:
    """Sends a message, and returns its answer once it is complete."""
    turns = page.locator(".turn").count()
    page.fill("#chat-text", text)
    page.press("#chat-text", "Enter")
    page.locator(".turn").nth(turns).wait_for()
    return page.locator(".message.assistant").last


def from_memory(answer: Any) -> tuple[int, int]:
    found = re.search(r"From memory: ([\d,]+) of ([\d,]+) prompt tokens", answer.inner_text())
    assert found is not None, answer.inner_text()
    cached, prompt = (int(number.replace(",", "")) for number in found.groups())
    return cached, prompt


def test_the_second_turn_comes_from_memory_and_says_where_and_why(open_page: Callable[..., Any]):
    page = open_page()
    page.click("#chat-new")
    agent = page.input_value("#chat-agent")
    assert "Noted" in say(page, "Remember: the code of ada is 1815.").inner_text()
    say(page, "Tell me a story.")
    answer = say(page, "What is the code of ada?")
    assert "1815" in answer.inner_text()
    cached, prompt = from_memory(answer)
    assert 100 < cached < prompt
    assert "this node has the agent's memory" in answer.inner_text()
    answer.locator(".chip").first.wait_for()
    assert answer.locator(".chip").first.inner_text().startswith("hot")
    answer.locator("summary").click()
    assert "(chosen)" in answer.locator("table.costs").inner_text()
    assert page.locator("#announcer").inner_text().endswith("of the prompt came from memory.")
    # Also what was said before the page was opened.
    page.reload()
    page.locator(".message").nth(5).wait_for()
    assert page.input_value("#chat-agent") == agent
    assert "The code of ada is 1815." in page.locator(".message").last.inner_text()


def test_an_answer_is_shown_while_it_comes_and_can_be_stopped(open_page: Callable[..., Any]):
    page = open_page()
    page.click("#chat-new")
    page.fill("#chat-text", "Say the numbers from one to sixty.")
    page.click("#chat-send")
    page.get_by_text("one, two, three").wait_for()
    assert page.locator("#chat-log").get_attribute("aria-busy") == "true"
    page.click("#chat-stop")
    page.get_by_text("Stopped. This turn is not kept.").wait_for()
    assert "sixty." not in page.locator(".message.assistant").inner_text()
    assert page.locator("#chat-log").get_attribute("aria-busy") == "false"


def test_the_next_message_does_not_wait_for_a_turn_s_costs(open_page: Callable[..., Any]):
    page, held, holding = open_page(), [], [True]
    page.route("**/v1/cluster/decisions/*", lambda route: held.append(route) if holding else route.continue_())
    page.click("#chat-new")
    say(page, "Remember: the code of ada is 1815.")
    assert page.locator("#chat-stop").is_hidden()
    assert "1815" in say(page, "What is the code of ada?").inner_text()
    assert page.locator(".turn table.costs").count() == 0
    holding.clear()
    for route in held:
        route.continue_()
    page.locator(".turn table.costs").nth(1).wait_for(state="attached")


DROPPED = """([data, kind]) => {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
  return transfer;
}"""

PASTE = """(data) => {
  const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.getElementById("chat-text").dispatchEvent(event);
}"""


@pytest.mark.parametrize("by", ["file", "drop", "paste"])
def test_a_picture_is_shown_to_the_agent(open_page: Callable[..., Any], by: str):
    page, png = open_page(), red_circle()
    page.click("#chat-new")
    page.select_option("#chat-model", "satchel/shapes")
    if by == "file":
        page.set_input_files("#chat-files", {"name": "file.png", "mimeType": "image/png", "buffer": png})
    else:
        transfer = page.evaluate_handle(DROPPED, [base64.b64encode(png).decode(), by])
        if by == "drop":
            page.dispatch_event("#chat-log", "drop", {"dataTransfer": transfer})
        else:
            page.evaluate(PASTE, transfer)
    page.locator(f'#chat-pictures img[alt="{by}.png"]').wait_for()
    assert "red circle" in say(page, "What is in the picture?").inner_text().lower()
    assert page.locator("#chat-pictures img").count() == 0
    shown = page.locator(".message.user img")
    assert shown.evaluate("(image) => image.naturalWidth") > 0
    if by == "file":
        # The agent is shown with its own model again, not with the first one, which sees no pictures.
        page.reload()
        page.locator(".message.user .chip").wait_for()
        page.wait_for_function("document.getElementById('chat-model').value === 'satchel/shapes'")
    answer = say(page, "What color is the circle?")
    assert "red" in answer.inner_text().lower() and from_memory(answer)[0] > 0


def test_a_picture_can_be_taken_away_again(open_page: Callable[..., Any]):
    page = open_page()
    page.set_input_files("#chat-files", {"name": "a.png", "mimeType": "image/png", "buffer": red_circle()})
    page.get_by_role("button", name="Remove a.png").click()
    assert page.locator("#chat-pictures img").count() == 0


def test_a_refusal_is_said_and_the_message_is_given_back(open_page: Callable[..., Any]):
    page = open_page()
    page.fill("#chat-agent", "no spaces")
    page.press("#chat-agent", "Tab")
    page.fill("#chat-text", "Hello")
    page.press("#chat-text", "Enter")
    page.locator(".message .notice.bad").wait_for()
    assert "X-Agent-ID" in page.locator(".message .notice.bad").inner_text()
    assert page.input_value("#chat-text") == "Hello"


def tab_to(page: Any, text: str) -> None:
    """Presses Tab until something with this text or label has the focus."""
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        element = "document.activeElement"
        name = page.evaluate(f"{element}.getAttribute('aria-label') || {element}.innerText || {element}.id || ''")
        seen.append(name)
        if name.strip() == text:
            return
    raise AssertionError(f"{text!r} is not among {seen}")


def test_everything_is_reached_with_the_keyboard(open_page: Callable[..., Any], world: World):
    page = open_page()
    page.get_by_text("live", exact=True).wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    tab_to(page, "New agent")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "chat-text"
    page.keyboard.type("Remember: the code of elk is 77.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Thank you.")
    assert page.locator(".message").count() == 0
    page.keyboard.press("Enter")
    page.locator(".turn").wait_for()
    agent = page.input_value("#chat-agent")
    page.locator(f'button[aria-label="Forget {agent}"]').wait_for()
    page.locator(".skip").focus()
    tab_to(page, f"Forget {agent}")
    page.keyboard.press("Enter")
    # The safe choice has the focus.
    assert page.evaluate("document.activeElement.innerText") == "Cancel"
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Forget {agent}"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("A new agent: its memory begins").wait_for()
    assert world.ask("GET", f"/v1/agents/{agent}").status_code == 404
    page.locator(".skip").focus()
    for view in ("Cluster", "Agents", "Requests", "Models"):
        tab_to(page, view)
        page.keyboard.press("Enter")
        page.locator(f'section[data-view="{view.lower()}"]').wait_for()
        assert page.locator("nav a[aria-current]").inner_text() == view


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_all_of_it_without_scrolling_sideways(open_page: Callable[..., Any], view: str):
    page = open_page(view, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.get_by_text("live", exact=True).wait_for()
    page.locator(f'section[data-view="{view}"]').wait_for()
    if view == "chat":
        page.click("#chat-new")
        say(page, "Tell me a story.")
        assert page.locator("#chat-send").bounding_box()["y"] < 740
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ends = "[...document.querySelectorAll('nav a')].map((link) => link.getBoundingClientRect().right)"
    assert max(page.evaluate(ends)) <= 360


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


COLORS = """([text, back]) => {
  const probe = document.body.appendChild(document.createElement("p"));
  probe.style.color = `var(--${text})`;
  probe.style.backgroundColor = `var(--${back})`;
  const style = getComputedStyle(probe);
  const found = [style.color, style.backgroundColor];
  probe.remove();
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(open_page: Callable[..., Any], scheme: str):
    page = open_page(color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.1) == (scheme == "dark")
    texts = ("text", "quiet", "accent", "good", "warn", "bad", "hot", "disk", "moved")
    pairs = [(text, back) for text in texts for back in ("back", "panel")]
    for pair in [*pairs, ("on-accent", "accent"), ("text", "mine"), ("text", "bad-back")]:
        assert contrast(*page.evaluate(COLORS, pair)) >= (3 if pair[0] == "hot" else 4.5), (scheme, pair)
