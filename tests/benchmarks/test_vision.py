"""The benchmark of pictures counts rightly. How fast anything is, is no test."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mlx.core as mx
import pytest
from PIL import Image

from benchmarks import parts as tables
from benchmarks.serve import targets
from benchmarks.vision import folders, media, parts, peers, run, scenery, servers, shapes, turns
from satchel.cluster.config.config import parse_config


class FakeEyes:
    """A server that takes 100 ms for what is new to it, and 10 for what it has seen; `says` by question."""

    def __init__(self, says: dict[str, str]) -> None:
        self._stream, self._says = servers.server.ClusterStream, says
        self._seen: set[str] = set()
        self.sent: list[tuple[str, str]] = []

    def see(self, messages: list[Any], tokens_max: int, agent: str = "") -> Any:
        content = messages[0]["content"]
        shown = json.dumps(next(part for part in content if part["type"] != "text"))
        question = content[-1]["text"] if len(messages) == 1 else messages[-1]["content"]
        self.sent.append((agent, shown))
        first = 0.010 if shown in self._seen else 0.100
        self._seen.add(shown)
        stream = self._stream(0.0, text=self._says[question], arrivals=[first], prompt=9, cached=9)
        stream.ended = first + 0.010
        return stream

    def forget(self) -> int:
        self._seen.clear()
        return 5000

    def kv_bytes(self) -> int:
        return 3000

    def encodes(self) -> int:
        return len(self.sent)


def starting(eyes: FakeEyes, refused: str | None = None, error: Exception | None = None) -> Any:
    @contextmanager
    def start(name: str = "satchel", settings: Any = None) -> Iterator[Any]:
        if name == refused and error is not None:
            raise error
        yield SimpleNamespace(eyes=eyes, name=name, disk_bytes=lambda: 700 * len(eyes.sent))

    return start


def right() -> dict[str, str]:
    return dict([*scenery.TALK, scenery.OTHER, scenery.FILM])


def quiet(text: str) -> None:
    pass


def test_a_ratio_follows_from_its_parts() -> None:
    """Cold 5 + 800 + 90 + 10, cached 5 + 10."""
    costs = parts.Costs(0.8, 0.09, 0.01, fixed_s=0.005)
    assert costs.ratio == pytest.approx(905 / 15)
    said = costs.verdict("turn 2", [19.0, 61.0])
    assert "= 905.0 ms" in said and "= 15.0 ms" in said and "would be 60.3x" in said
    assert "for 19x it could take 47.6 ms, for 61x it could take 14.8 ms" in said
    slower = replace(costs, over_http_s=1.2).verdict("turn 2", [61.0])
    assert "(1,200.0 over HTTP)" in slower and "would be 80.0x" in slower and "for 61x it could take 19.7 ms" in slower
    turn = turns._of_turn(parts.Costs(0.8, 0.08, 0.01, tokens=80, fixed_s=0.005), 100, 85)
    assert (turn.prefill_s, turn.new_tokens, turn.cached_s) == (pytest.approx(0.1), 15, pytest.approx(0.03))
    assert "prefill of 15 new tokens 15.0" in turn.verdict("turn 2", [19.0])
    middle = parts.median_costs([costs, parts.Costs(0.6, 0.1, 0.03), parts.Costs(9.0, 0.2, 0.02)])
    assert (middle.encode_s, middle.prefill_s, middle.step_s) == (0.8, 0.1, 0.02)


def test_a_fresh_picture_is_another_one_and_clips_share_frames() -> None:
    def pixels(part: dict[str, Any]) -> list[bytes]:
        urls = part["video"] if part["type"] == "video" else [part["image_url"]["url"]]
        return [Image.open(BytesIO(base64.b64decode(url.partition(",")[2]))).tobytes() for url in urls]

    shown = [pixels(scenery.picture(64))[0] for _ in range(60)]
    assert len(set(shown)) == 60
    assert pixels(scenery.picture(64, 7)) == pixels(scenery.picture(64, 7))
    whole, clip = pixels(scenery.film(64, 8, 3)), pixels(scenery.film(64, 8, 3, 4))
    assert len(set(whole)) == 8 and whole[4:] == clip[:4] and not set(whole) & set(clip[4:])
    assert not set(whole) & set(pixels(scenery.film(64, 8, 4)))


def test_every_turn_s_messages_begin_with_the_turn_s_before() -> None:
    talk = turns.TalkOptions(16, known=True)
    first, second, third = (talk.messages({"type": "image_url"}, turn) for turn in range(3))
    assert third[:3] == second and second[:1] == first
    assert second[1:] == [
        {"role": "assistant", "content": "A red circle."},
        {"role": "user", "content": "What colour is the circle?"},
    ]


def test_turns_are_compared_with_what_is_fresh() -> None:
    """Without: other agents and pictures, nothing kept. Warm-up rounds do not count."""
    eyes = FakeEyes(right())
    sight: Any = SimpleNamespace(costs=lambda *_, **__: parts.Costs(0.05, 0.03, 0.005, tokens=9))
    budget = tables.Budget(60.0)
    part = turns.turns(sight, starting(eyes), [1024], turns.TalkOptions(16, known=True), 2, budget, quiet)
    ratios = [row["first token, without / with"] for row in part.rows]
    assert ratios == pytest.approx([1.0, 10.0, 10.0]) and part.rows[0]["rounds"] == 2
    assert [row["whole answer, without / with"] for row in part.rows] == pytest.approx([1.0, 5.5, 5.5])
    assert [(target.found, target.met) for target in part.targets][:1] == [(pytest.approx(10.0), False)]
    without = [(agent, shown) for agent, shown in eyes.sent if agent.startswith("without")]
    assert len(without) == len(set(without)) == len({shown for _, shown in without}) == 9
    assert any("fixed 5.0 + encode 50.0 + prefill 30.0 + first step 5.0 = 90.0 ms" in note for note in part.notes)
    assert "Answers: 12 of 12 right, 3 of 3 equal to the same turn's cold one." in part.notes


def test_wrong_answers_and_servers_that_do_not_start_are_told() -> None:
    eyes = FakeEyes({**right(), "What colour is the circle?": "Blue."})
    failure = targets.CannotStart("it ended with code 3")
    start, budget = starting(eyes, "vllm-mlx", failure), tables.Budget(60.0)
    talk = turns.TalkOptions(16, known=True)
    part = peers.peers(start, ["satchel", "vllm-mlx"], 64, talk, 1, budget, quiet)
    (row,) = part.rows
    assert (row["server"], row["right"], row["as cold"]) == ("satchel", "6 of 8", "8 of 8")
    assert row["turn 2, cold / this"] == pytest.approx(10.0) and row["another conversation, ms"] == pytest.approx(10.0)
    assert part.notes[0] == "vllm-mlx was not measured: CannotStart: it ended with code 3"
    # The time is over once the server is up.
    over = SimpleNamespace(left_s=1.0, rounds=lambda most: range(0))
    late = peers.peers(start, ["satchel"], 64, talk, 1, over, quiet)
    assert not late.rows and late.notes[0] == "There was no time for satchel."
    unknown = peers.peers(start, ["satchel"], 64, turns.TalkOptions(16, known=False), 1, budget, quiet)
    assert unknown.rows[0]["right"] is None and unknown.rows[0]["as cold"] is None


def test_bytes_on_the_disk_are_told_apart_by_what_another_turn_shares() -> None:
    eyes = FakeEyes(right())
    server: Any = SimpleNamespace(eyes=eyes, disk_bytes=iter([0, 900, 1500]).__next__)
    assert media._on_disk(server, 64, turns.TalkOptions(16, known=True)) == (300, 600)
    assert media._in_memory(server, 64, turns.TalkOptions(16, known=True)) == (9, 2000, 3000)


def test_an_answer_is_timed_and_read_from_its_stream() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if body["max_tokens"] == 1:
            return httpx.Response(503, text="full")
        usage = {"prompt_tokens": 116, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 115}}
        chunks = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": body["model"]}}]},
            {"choices": [{"delta": {"content": request.headers["X-Agent-ID"]}}]},
            {"choices": [], "usage": usage},
        ]
        return httpx.Response(200, text="".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n")

    with servers.Eyes("http://server", "model-") as eyes:
        eyes._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
        stream = eyes.see([], 8, "ada")
        assert (stream.text, stream.prompt, stream.cached, len(stream.arrivals)) == ("model-ada", 116, 115, 2)
        assert stream.sent < stream.arrivals[0] <= stream.ended
        with pytest.raises(RuntimeError, match="503: full"):
            eyes.see([], 1, "ada")


def test_settings_switch_parts_off() -> None:
    """As the config reads them; a limit of nothing is refused, so that it is one byte."""
    found = {}
    for name, settings in servers.KEPT.items():
        config = parse_config({"models": [{"name": "bench", "source": "folder"}], **settings})
        limits = (config.scheduling.vision_bytes_max, config.scheduling.prefix_bytes_max)
        found[name] = tuple(limit is None or limit > 1 for limit in limits)
    assert found == {"both": (True, True), "features": (True, False), "KV": (False, True), "none": (False, False)}


def test_a_random_model_is_shown_pictures_and_videos(tmp_path: Path) -> None:
    """Every look is a cold one, though the picture is the same, and then one of which everything is known."""
    shape = shapes.VISION_SHAPES["4b"]
    assert shape is not None
    rope = shape.config(json.loads((folders.MODEL / "config.json").read_text()))
    assert rope["text_config"]["rope_scaling"]["mrope_section"] == [24, 20, 20]
    folders.write_vision_folder("tiny", tmp_path / "tiny", mx.float32)
    sight = parts.Sight(tmp_path / "tiny")
    image = scenery.circle(256, 1)
    for _ in range(2):
        costs = sight.look([image], "What is it?", video=False)
        assert sight.engine.pictures.embeddings.encodes == 1
        assert sight.engine.counters.cached_tokens == costs.tokens - 1
        # One for 32 x 32 pixels, and one before and behind.
        assert costs.seen == 8 * 8 + 2 < costs.tokens
        assert min(costs.encode_s, costs.prefill_s, costs.step_s) > 0
    film = scenery.film_frames(64, 8, 2)
    assert sight.look(film, "How does it move?", video=True).seen > 0
    assert sight.engine.pictures.embeddings.encodes == 4, "two frames at a time"


def test_options_are_checked_and_results_of_models_stand_side_by_side() -> None:
    options = run.read_options(["--parts", "video,turns", "--frames", "4,64", "--shape", "4b"])
    assert (options.parts, options.frames, options.side) == (["video", "turns"], [4, 64], 1024)
    for wrong in (["--frames", "65"], ["--parts", "all"], ["--rounds", "0"], ["--only", "sglang"]):
        with pytest.raises(SystemExit):
            run.read_options(wrong)
    assert (run.label("video", "shapes"), run.label("video", "4b")) == ("video", "video 4b")
