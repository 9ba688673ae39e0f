"""What identifies a model: the one place that makes model ids.

Two ids, one within the other:

    files id    which model it is: every byte of its files. Token ids and text mean the same wherever it is equal, so
                agents' words belong to it.
    model id    and how this machine computes with it. Block ids chain from it, so KV belongs to it.

**Files.** Weights, config, tokenizer, template, what a picture's processor is told, code, and the adapter. A list of
what counts would forget what a library reads tomorrow, so every file in the folder counts but those that nothing
loads (`_NOT_READ`); and those elsewhere that an index of weights names. Where several files have a tensor of one name,
mlx-lm takes the one that the folder lists last, so then the order is a part too.

**Computing.** Whatever can change a number in a block, be it by rounding:

    dtype       asked for, or the weights' own: those may be mixed, and the logits' type says nothing of the layers'
    weights     quantized ones multiplied as stored, dequantized or both: another order of additions
    kv          policy and format of sealed blocks: what later tokens attend to
    numerics    with `fast` a decode step may multiply codes directly, and a GPU encode pictures together. A
                `reproducible` replica promises bits, so it takes nothing that a fast one wrote
    device      CPU, Metal or CUDA. On a CPU equal tokens give equal bits, and a GPU's would not be among them; what two
                kinds of GPU differ by nobody has measured. Chips of one kind are equal within the tolerance that is
                stated for GPUs, so KV moves from Mac to Mac; with `reproducible` the chip is a part, as another one
                adds in another order
    rounding    settings in the environment by which MLX multiplies float32 as something shorter, on a GPU
    versions    of the libraries that compute: kernels and models' code change with them. Of those that prepare
                pictures too, for a model that takes them

What a block does not depend on is no part: chunks, batch and scheduling (the position law), how far the context is
limited (`context_tokens_max` is a bound, and rope is scaled by the config alone), how tokens are drawn, the path.

`_MODEL_TAG` is raised when Satchel itself computes otherwise. Then, and whenever an id changes, KV under the old one
is found by nobody, and goes as what is least recently used does.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob
from importlib.metadata import version
from pathlib import Path

from ....cluster.environment import mlx_rounding
from ....cluster.errors import ModelLoadError
from ...model_files.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, WEIGHTS, named_by_index
from ...model_files.weights import WeightFile
from ...protocol.block_ids import digest
from ..kv.device import device_kind, device_name, on_gpu
from ..kv.sealing import FORMAT_VERSION

_FILES_TAG = b"satchel.files.1"
_MODEL_TAG = b"satchel.model.2"

_NOT_READ = (
    ".*",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    *(f"*.{kind}" for kind in ("png", "jpg", "jpeg", "gif", "webp", "pdf")),
    # Weights in formats of others.
    *(f"*.{kind}" for kind in ("gguf", "onnx", "pt", "pth", "h5", "msgpack")),
    "pytorch_model*.bin",
    # How tokens are drawn, and where an answer ends.
    "generation_config.json",
)


@dataclass(frozen=True)
class Identity:
    """What a model is, and how it is computed with.

    Attributes:
        files: SHA-256 in hexadecimal, by `model/NAME`, and `adapter/NAME` for an adapter's.
        computing: settings by name.
    """

    files: Mapping[str, str]
    computing: Mapping[str, str]

    @property
    def files_id(self) -> bytes:
        """32 bytes that say which model it is. Where they are equal, token ids mean the same."""
        return digest(_FILES_TAG, *_flat(self.files))

    @property
    def model_id(self) -> bytes:
        """32 bytes that name everything a block's content depends on besides its tokens. Two nodes with equal ids may
        exchange blocks."""
        return digest(_MODEL_TAG, self.files_id, *_flat(self.computing))


def files_of(folder: Path, adapter: Path | None = None) -> dict[str, Path]:
    """The files that say what a model is, by name."""
    found = {path.name: path for path in folder.iterdir() if path.is_file() and not _is_ignored(path.name)}
    if INDEX in found:
        # One that cannot be read names nothing, for those who load weights too.
        with suppress(ModelLoadError):
            found |= {name: folder / name for name in named_by_index(found[INDEX]) if (folder / name).is_file()}
    named = {f"model/{name}": path for name, path in found.items()}
    if adapter is not None:
        named |= {f"adapter/{name}": adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return dict(sorted(named.items()))


def order_of_weights(folder: Path, files: Sequence[WeightFile]) -> dict[str, str]:
    """The order in which the files are loaded, where that decides which tensors count; else nothing."""
    counts = Counter(name for file in files for name in file.tensors)
    if all(count == 1 for count in counts.values()):
        return {}
    # As mlx-lm asks for them.
    return {"order of weights": " ".join(Path(path).name for path in glob(str(folder / WEIGHTS)))}  # noqa: PTH207


def computing(*, dtype: str, weights: str, kv: str, numerics: str, seeing: bool) -> dict[str, str]:
    """How this process computes.

    Args:
        dtype: of the computation, with whether that is the weights' own.
        weights: as `prepare_weights` returns it.
        kv: the policy's name.
        seeing: whether the model takes pictures.
    """
    kind, name = device_kind(), f"{device_name()} {platform.machine()}"
    libraries = ["mlx", "mlx-lm", *(["mlx-vlm", "transformers", "pillow"] if seeing else [])]
    return {
        "dtype": dtype,
        "weights": weights,
        "kv": f"{kv}.{FORMAT_VERSION}",
        "numerics": numerics,
        "device": f"{kind}, {name}" if numerics == "reproducible" else kind,
        **(mlx_rounding() if on_gpu() else {}),
        **{library: version(library) for library in libraries},
    }


def refuse_elsewhere(source: str, config: Mapping[str, object]) -> None:
    """Refuse a model that would read weights that are no part of its id.

    Raises:
        ModelLoadError: it would.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("ple_storage"):
        raise ModelLoadError(f"{source} keeps weights in files of their own kind (ple_storage), which is not supported")


def _is_ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _NOT_READ)


def _flat(parts: Mapping[str, str]) -> list[bytes]:
    return [text.encode() for part in sorted(parts.items()) for text in part]
