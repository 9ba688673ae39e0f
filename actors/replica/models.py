"""Models on disk: where a source lives, what identifies it, how it is loaded. mlx-lm is imported here and in kv_cache.

A source is `embedded:NAME` (ships with Satchel), a folder, or a Hub id, which is downloaded once into the Hub's cache.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as mlx_lm_load_model

from ...cluster.errors import ModelLoadError
from .end_tokens import read_end_tokens
from .kv_cache import ModelCacheSpec, read_spec

EMBEDDED = Path(__file__).parent / "embedded"
HUB_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "*.txt"]
KV_FORMAT = b"fp.1"
"""Names how blocks are kept; part of the model id, so blocks of another format are other blocks."""

Progress = Callable[[str, float | None], None]
"""Called with what is going on and the fraction done, None where it is unknown."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `context_tokens` bounds prompt and answer together."""

    model: Any
    folder: Path
    model_id: bytes
    spec: ModelCacheSpec
    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    dtype: str

    def new_caches(self) -> list[Any]:
        """Empty caches for one row, one a layer."""
        return make_prompt_cache(self.model)


def resolve(source: str, progress: Progress) -> Path:
    """The folder of a source; a Hub id is downloaded if it is not in the Hub's cache yet.

    Raises:
        ModelLoadError: no such folder or embedded model, or the Hub cannot be reached.
    """
    if source.startswith("embedded:"):
        folder = EMBEDDED / source.removeprefix("embedded:")
        if not (folder / "config.json").is_file():
            known = ", ".join(sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))) or "none"
            raise ModelLoadError(f"no embedded model {folder.name!r}; there are: {known}")
        return folder
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{folder} has no config.json; a model folder is in the Hugging Face layout")
        return folder
    if source.startswith(("/", ".", "~")) or source.count("/") != 1:
        raise ModelLoadError(f"{source!r} is neither a folder nor a Hub id of the form owner/name")
    return _download(source, progress)


def _download(repository: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from tqdm.auto import tqdm

    class Bar(tqdm):
        """Forwards the Hub's own byte counter to `progress`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = False
            kwargs["file"] = _Nowhere()
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            result = super().update(n)
            if self.total and self.unit == "B":
                progress(f"downloading {repository}", min(1.0, self.n / self.total))
            return result

    progress(f"downloading {repository}", None)
    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_PATTERNS, tqdm_class=Bar))
    except LocalEntryNotFoundError:
        raise ModelLoadError(
            f"{repository} is not in the local Hub cache and the Hub cannot be reached: "
            "connect once to download it, or give a folder as the model's source"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"{repository} cannot be downloaded: {first_line}") from error


class _Nowhere:
    """A text stream that drops what is written; the bar draws itself in the command line, not here."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None


def _weights_header(path: Path) -> bytes:
    """The safetensors header (names, shapes, types, offsets): changes whenever the file's layout does."""
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        if size > 100 * 2**20:
            raise ModelLoadError(f"{path} is not a safetensors file")
        return file.read(size)


def model_id(folder: Path, dtype: str) -> bytes:
    """32 bytes that name everything a block's content depends on besides its tokens.

    Config, tokenizer, chat template, weight headers, sizes and first and last bytes of the data, compute dtype, the
    versions of the libraries that compute, and the block format. Two nodes with equal ids may exchange blocks.
    """
    hasher = hashlib.sha256()

    def field(name: str, value: bytes) -> None:
        hasher.update(struct.pack(">I", len(name)) + name.encode() + struct.pack(">Q", len(value)) + value)

    field("dtype", dtype.encode())
    field("format", KV_FORMAT)
    for library in ("mlx", "mlx-lm"):
        field(library, version(library).encode())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"):
        if (folder / name).is_file():
            field(name, (folder / name).read_bytes())
    for path in sorted(folder.glob("model*.safetensors")):
        header = _weights_header(path)
        with path.open("rb") as file:
            file.seek(8 + len(header))
            head = file.read(65536)
            file.seek(max(0, path.stat().st_size - 65536))
            edges = head + file.read(65536)
        field(path.name, header)
        field("size", path.stat().st_size.to_bytes(8, "big"))
        field("edges", edges)
    return hasher.digest()


def _read_weights(model: Any, dtype: str, progress: Callable[[float], None]) -> None:
    """Bring the lazy weights into memory, in the compute dtype, telling the fraction of their bytes."""
    chosen = _pick_dtype(dtype)
    if chosen is not None:
        model.set_dtype(chosen)
    if mx.default_device().type == mx.DeviceType.cpu:
        model.apply(_column_major)
    weights: list[Any] = [weight for _, weight in tree_flatten(model.parameters())]
    total, done = sum(weight.nbytes for weight in weights), 0
    for weight in weights:
        mx.eval(weight)
        done += weight.nbytes
        progress(done / max(1, total))


def _pick_dtype(wanted: str) -> mx.Dtype | None:
    """The compute dtype: float32 on a CPU, where half precision is slow and less exact; else the model's own."""
    if wanted != "auto":
        return getattr(mx, wanted)
    return mx.float32 if mx.default_device().type == mx.DeviceType.cpu else None


def load(source: str, *, dtype: str = "auto", context_tokens_max: int | None, progress: Progress) -> LoadedModel:
    """Load a source and run one token through it, so that the first request meets a warm model.

    Args:
        dtype: `auto`, or the name of an MLX float type.
        context_tokens_max: lowers the model's own context.

    Raises:
        ModelLoadError: with the reason in one sentence.
    """
    folder = resolve(source, progress)
    progress(f"loading {source}", None)
    try:
        model, config = mlx_lm_load_model(folder, lazy=True)
        _read_weights(model, dtype, lambda fraction: progress(f"loading {source}", fraction))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RuntimeError, OSError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{source} cannot be loaded: {error}") from error
    caches = make_prompt_cache(model)
    logits = model(mx.array([[0, 0]]), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    used = str(logits.dtype).removeprefix("mlx.core.")
    return LoadedModel(
        model=model,
        folder=folder,
        model_id=model_id(folder, used),
        spec=read_spec(caches, tokens=2),
        context_tokens=_context_tokens(config, context_tokens_max),
        vocabulary_size=int(logits.shape[-1]),
        eos_token_ids=_end_tokens(folder),
        dtype=used,
    )


def _column_major(weight: mx.array) -> mx.array:
    """The same matrix with its columns contiguous.

    A layer computes x @ weight.T; MLX's CPU build multiplies about twice as fast when that transpose is contiguous
    (256 x 3072 float32: 145 ms against 301 at 512 rows, 8.2 against 14.1 at 16).
    """
    return mx.contiguous(weight.T).T if weight.ndim == 2 and weight.dtype == mx.float32 else weight


def _context_tokens(config: dict[str, Any], limit: int | None) -> int:
    text = config.get("text_config", {})
    own = config.get("max_position_embeddings") or text.get("max_position_embeddings") or 4096
    return min(int(own), limit) if limit else int(own)


def _end_tokens(folder: Path) -> frozenset[int]:
    named = read_end_tokens(folder)
    if named:
        return named
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(folder).eos_token_id
    return frozenset() if own is None else frozenset([own])
