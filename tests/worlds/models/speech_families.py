"""Tiny models of speech, written the way real ones lie on disk. The weights are random but seeded."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from satchel.actors.replica.loading.models import EMBEDDED

RATE = 16_000
_TEXTS = 50_257
"""How many tokens of text Whisper's tokenizer has."""

_TIMES = 1501


def write_speech_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a model of a family, `whisper` or `soprano`, and returns its folder."""
    folder.mkdir(parents=True)
    {"whisper": _write_whisper, "soprano": _write_soprano}[family](folder, seed)
    return folder


def noise(seconds: float, seed: int = 1) -> np.ndarray:
    """Returns loud noise, `(samples,) float32`, at 16,000 samples a second."""
    return (0.3 * np.random.default_rng(seed).standard_normal(round(seconds * RATE))).astype("<f4")


def write_random_weights(path: Path, model: Any, seed: int, scale: float = 0.2) -> None:
    """Writes a model's parameters, drawn anew."""
    key, weights = mx.random.key(seed), {}
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        key, own = mx.random.split(key)
        random = mx.random.normal(value.shape, key=own) * scale
        # Scales of norms are about 1.
        weights[name] = (mx.abs(random) + 1.0 if value.ndim == 1 and name.endswith("weight") else random).astype(
            value.dtype
        )
    mx.save_safetensors(str(path), weights)


def _write_whisper(folder: Path, seed: int) -> None:
    config = {
        "model_type": "whisper",
        "n_mels": 80,
        "n_audio_ctx": 1500,
        "n_audio_state": 16,
        "n_audio_head": 2,
        "n_audio_layer": 1,
        "n_vocab": 51_865,
        "n_text_ctx": 24,
        "n_text_state": 16,
        "n_text_head": 2,
        "n_text_layer": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    whisper: Any = import_module("mlx_audio.stt.models.whisper.whisper")
    model = whisper.Model(whisper.ModelDimensions.from_dict(config))
    # With others words often have no length, and are left out.
    write_random_weights(folder / "model.safetensors", model, seed + 2, 1.0)
    _write_whisper_tokenizer(folder, list(whisper.LANGUAGES)[:99])
    frames = {"feature_size": 80, "hop_length": 160, "n_fft": 400, "chunk_length": 30, "sampling_rate": RATE}
    kinds = {"feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(frames | kinds))


def _write_whisper_tokenizer(folder: Path, languages: list[str]) -> None:
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    # Words of two and more letters, which no text is cut into: only the model writes them.
    for number in range(len(letters), _TEXTS):
        vocabulary[f"Ġ{number:x}"] = number
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()  # type: ignore[assignment]
    names = ["endoftext", "startoftranscript", *languages, "translate", "transcribe", "startoflm", "startofprev"]
    names += ["nospeech", "notimestamps", *(f"{0.02 * time:.2f}" for time in range(_TIMES))]
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = "<|endoftext|>"
    config = {"tokenizer_class": "WhisperTokenizer", "bos_token": end, "eos_token": end, "unk_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": end}))


def _write_soprano(folder: Path, seed: int) -> None:
    """A model that speaks without other packages: a language model, and a decoder of its hidden states."""
    base = EMBEDDED / "recall"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder / name)
    config = {
        "model_type": "soprano",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": 3072,
        "max_position_embeddings": 1024,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    code: Any = import_module("mlx_audio.tts.models.soprano.soprano")
    model = code.Model(code.ModelConfig.from_dict({**config, "model_path": str(folder)}))
    path = folder / "model.safetensors"
    write_random_weights(path, model, seed, 0.05)
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    # It stops after a few tokens.
    head, stop = weights["language_model.lm_head.weight"], Tokenizer.from_file(str(folder / "tokenizer.json"))
    head[stop.token_to_id(json.loads((folder / "tokenizer_config.json").read_text())["pad_token"])] *= 5.0
    mx.eval(weights)
    mx.save_safetensors(str(path), weights)
