"""Models with capped scores: what is computed in pieces is what is computed at once. What decode steps read is compared
in `test_compiled_step.py`."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import gemma2
from mlx_lm.models.cache import make_prompt_cache

from satchel.actors.replica.device.device import on_gpu
from satchel.actors.replica.kv import soft_caps
from satchel.actors.replica.kv.paged_cache import Reads
from satchel.actors.replica.loading import models
from tests.worlds.models.families import write_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "model", "gemma2"))


@pytest.mark.parametrize("kv", ["q4", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_prompts_scores_need_not_exist_at_once(folder: str, kv: str, monkeypatch: pytest.MonkeyPatch):
    """On a CPU its logits are the same to the last bit, behind whole blocks and inside of one."""
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False, kv=kv)
    prompt = mx.array([[at % 97 for at in range(600)]], mx.uint32)
    asked: list[int] = []

    def logits(most: int) -> list[mx.array]:
        monkeypatch.setattr(soft_caps, "_at_once", lambda heads, columns: asked.append(columns) or most)
        caches = loaded.new_caches()
        return [loaded.model(prompt[:, start:stop], cache=caches) for start, stop in ((0, 300), (300, 600))]

    for whole, cut in zip(logits(600), logits(70), strict=True):
        assert mx.abs(whole - cut).max() <= (1e-4 * mx.abs(whole).max() if on_gpu() else 0.0)
    assert asked
    # With the model's own caches it is the model's own code.
    asked.clear()
    loaded.model(prompt, cache=make_prompt_cache(loaded.model))
    assert not asked


def test_layers_are_changed_once_and_others_not_at_all(folder: str):
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False)
    assert loaded.way.reads is not Reads.DEQUANTIZED
    kinds = [type(layer.self_attn) for layer in loaded.model.layers]
    assert soft_caps.install(loaded.model) and [type(layer.self_attn) for layer in loaded.model.layers] == kinds
    assert len(set(kinds)) == 1 and issubclass(kinds[0], gemma2.Attention) and kinds[0] is not gemma2.Attention


def test_a_cap_is_not_used_where_the_models_code_calls_mlxs_attention(folder: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gemma2, "scaled_dot_product_attention", print, raising=False)
    loaded = models.load(folder, context_tokens_max=None, progress=lambda *_: None, dtype="float32", warm=False)
    assert {type(layer.self_attn) for layer in loaded.model.layers} == {gemma2.Attention}
