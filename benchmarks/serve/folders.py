"""Writes the model folders that are measured, in the Hugging Face layout, and says what this machine computes on.

    python -m benchmarks.serve.folders OUT NAME

Three things about them make servers comparable:

- Every answer has exactly `max_tokens` tokens, whatever a server knows of `ignore_eos`: greedy decoding draws only
  whole words, because the embedding (which is the output layer too) of every other token is zero.
- Every token is a word with its space, so that every server can send it at once: a piece of a character, or a word that
  may go on, is held back by some and not by others.
- On a CPU the weights are float32, in which Satchel computes there: half precision is ten times slower on it.
"""

from __future__ import annotations

import json
import re
import shutil
import string
import sys
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from .prompts import WORDS_FILE
from .shapes import SHAPES, ServedShape

EMBEDDED = Path(__file__).resolve().parents[2] / "actors" / "model_files" / "embedded" / "recall"
END = "<|endoftext|>"
"""The end-of-sequence token of the copies; no prompt has it, and it is never drawn."""

TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")


def write_folder(name: str, folder: Path, dtype: mx.Dtype) -> None:
    """Write the model called `name`, with a list of its words: `[text, token id]`, each one token after a space."""
    shape = SHAPES[name]
    size = shape.vocabulary if shape else json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    drawable, words, end = write_text_files(folder, size)
    model, config = _random_model(shape) if shape else _embedded_model()
    keep_rows(model.model.embed_tokens, drawable)
    model.update(tree_map(lambda weight: weight.astype(dtype), model.parameters()))
    if shape and shape.bits:
        nn.quantize(model, group_size=64, bits=shape.bits)
    mx.eval(model.parameters())
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    write_settings(folder, config, words, end, dtype)


def write_text_files(folder: Path, size: int) -> tuple[list[int], list[tuple[str, int]], int]:
    """Makes the folder, with the tokenizer and the template of a model of `size` tokens. Returns as
    `write_tokenizer`."""
    folder.mkdir(parents=True)
    for file in TOKENIZER_FILES:
        shutil.copy(EMBEDDED / file, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": END, "pad_token": END}))
    return write_tokenizer(folder, size)


def write_settings(
    folder: Path, config: dict[str, Any], words: list[tuple[str, int]], end: int, dtype: mx.Dtype
) -> None:
    """Writes the model's config and the words for its prompts."""
    told = {**config, "eos_token_id": end, "pad_token_id": end, "bos_token_id": None, "dtype": name_of(dtype)}
    (folder / "config.json").write_text(json.dumps(told, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": end}))
    (folder / WORDS_FILE).write_text(json.dumps(words))


def write_tokenizer(folder: Path, size: int) -> tuple[list[int], list[tuple[str, int]], int]:
    """The embedded tokenizer, filled up to `size` entries with words that can be drawn and never come of a text.

    Returns:
        The ids that may be drawn, the words for prompts, and the id of END.
    """
    data = json.loads((EMBEDDED / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = data["model"]["vocab"]
    if size > len(vocabulary) + len(data["added_tokens"]):
        vocabulary |= {token["content"]: token["id"] for token in data["added_tokens"]}
        fillers = (f"Ġ{''.join(letters)}" for letters in product(string.ascii_lowercase, repeat=4))
        for filler in fillers:
            if len(vocabulary) == size:
                break
            vocabulary.setdefault(filler, len(vocabulary))
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data, ensure_ascii=False))
    drawable = {content: id for content, id in vocabulary.items() if re.fullmatch("Ġ[A-Za-z]+", content)}
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == size and max(tokenizer.get_vocab().values()) == size - 1
    texts = [content.replace("Ġ", " ") for content in drawable if drawable[content] < 3072]
    words = [(text[1:], ids[0]) for text in texts if len(ids := tokenizer.encode(text).ids) == 1]
    end = tokenizer.token_to_id(END)
    assert end is not None
    return sorted(drawable.values()), words, end


def _random_model(shape: ServedShape) -> tuple[qwen3.Model, dict[str, Any]]:
    mx.random.seed(20)
    config = shape.config()
    return qwen3.Model(qwen3.ModelArgs.from_dict(config)), config


def _embedded_model() -> tuple[qwen3.Model, dict[str, Any]]:
    config = json.loads((EMBEDDED / "config.json").read_text())
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.load_weights(str(EMBEDDED / "model.safetensors"))
    return model, config


def keep_rows(output: Any, drawable: list[int]) -> None:
    """Zeroes all other tokens in the weights of the output layer, which may be the embedding too: their logits are 0,
    and the greatest of hundreds of others is not."""
    rows = output.weight
    kept = mx.zeros((rows.shape[0], 1), dtype=rows.dtype)
    kept[mx.array(drawable)] = 1
    output.weight = rows * kept


def name_of(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    gpu = mx.default_device().type == mx.DeviceType.gpu
    write_folder(name, folder, mx.bfloat16 if gpu else mx.float32)
    print(json.dumps({"device": "gpu" if gpu else "cpu"}))


if __name__ == "__main__":
    main()
