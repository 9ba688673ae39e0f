"""What identifies a model: its files, and how this machine computes.

Two ids, the second of which includes the first:

    files id    hashes every byte of the model's files. Token ids and text mean the same if it is equal, so agents'
                token ids and texts belong to it.
    model id    also hashes how this machine computes. Block ids chain from it, so KV belongs to it.

**Files.** Weights, config, tokenizer, template, the picture processor's config, code, and the adapter. A fixed list of
files would miss what a library reads tomorrow, so all files of the folder count except those that nothing loads
(`_NOT_READ`). Files elsewhere that an index of weights names count too. If several files have a tensor of the same
name, mlx-lm takes the one that the folder lists last, so then the order is included too.

**Computing.** Everything that can change a number in a block, even by rounding:

    dtype       asked for, or the weights' own: those may be mixed, and the logits' dtype does not tell the layers'
    weights     quantized weights multiplied as stored, dequantized or both, and joined or not: each adds in its own
                order. On CUDA stored weights are dequantized for products of many rows (`kernels/many_rows.py`)
    kv          policy and format of sealed blocks, which later tokens attend to
    numerics    with `fast` a decode step may multiply codes directly, CUDA may multiply few rows by a kernel if
                that is faster, and a GPU may encode pictures together. A `reproducible` replica promises bits, so it
                takes nothing that a fast one wrote
    device      CPU, Metal or CUDA. On a CPU equal tokens give equal bits, but a GPU gives others; how much two kinds of
                GPU differ is not measured. Chips of one kind are equal within the tolerance stated for GPUs, so KV
                moves from Mac to Mac. `reproducible` includes the chip, because another chip adds in another order
    blas        what multiplies on a CPU if it is not MLX's own: layers with a bias add the bias in another order
    products    where float32 is multiplied in a shorter format, on Macs with tensor units (M5) and on CUDA, unless an
                environment variable forbids it. Other formats are rounded alike with such units and without
    versions    of the libraries that compute, because kernels and models' code change; for models that take pictures
                also of those that prepare them

Blocks do not depend on these, so they are not included: chunks, batches and scheduling (the position law), the context
limit (`context_tokens_max` is only a bound; rope is scaled by the config alone), sampling, and paths.

`ModelIdentity` makes the ids.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from glob import glob
from pathlib import Path

import mlx.core as mx

from ....cluster.environment import mlx_rounding
from ....cluster.errors import ModelLoadError
from ...model_files.source import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, WEIGHTS, named_by_index
from ...model_files.weights import WeightFile
from ...protocol.block_ids import digest
from ..device import blas
from ..device.device import device_kind, device_name, has_tensor_units, multiplies_exactly
from ..proving.findings import version_of as version

_NOT_READ = (
    ".*",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    *(f"*.{kind}" for kind in ("png", "jpg", "jpeg", "gif", "webp", "pdf")),
    # Weights in other formats.
    *(f"*.{kind}" for kind in ("gguf", "onnx", "pt", "pth", "h5", "msgpack")),
    "pytorch_model*.bin",
    # Sampling defaults, and end-of-sequence tokens.
    "generation_config.json",
)


def files_of(folder: Path, adapter: Path | None = None) -> dict[str, Path]:
    """Returns the files that identify a model, by name."""
    paths = {path.name: path for path in folder.iterdir() if path.is_file() and not _is_ignored(path.name)}
    if INDEX in paths:
        # If an index is unreadable, it names no files; that is also how weights are loaded.
        with suppress(ModelLoadError):
            paths |= {name: folder / name for name in named_by_index(paths[INDEX]) if (folder / name).is_file()}
    named = {f"model/{name}": path for name, path in paths.items()}
    if adapter is not None:
        named |= {f"adapter/{name}": adapter / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return dict(sorted(named.items()))


def order_of_weights(folder: Path, files: Sequence[WeightFile]) -> dict[str, str]:
    """Returns the order in which the files are loaded, if it decides which tensors are used; else nothing."""
    counts = Counter(name for file in files for name in file.tensors)
    if all(count == 1 for count in counts.values()):
        return {}
    # In the order in which mlx-lm lists them.
    return {"order of weights": " ".join(Path(path).name for path in glob(str(folder / WEIGHTS)))}  # noqa: PTH207


def computing(*, dtype: str, weights: str, kv: str, numerics: str, seeing: bool) -> dict[str, str]:
    """Returns how this process computes, as settings by name.

    Args:
        dtype: the compute dtype, and whether it is the weights' own.
        weights: as `prepare_weights` returns it, and whether products are joined.
        kv: the policy's format.
        seeing: whether the model takes pictures.
    """
    kind, name = device_kind(), f"{device_name()} {platform.machine()}"
    libraries = ["mlx", "mlx-lm", *(["mlx-vlm", "transformers", "pillow"] if seeing else [])]
    return {
        "dtype": dtype,
        "weights": f"{weights}, dequantized for many rows" if _dequantizes(kind, weights) else weights,
        "kv": kv,
        "numerics": numerics,
        "device": f"{kind}, {name}" if numerics == "reproducible" else kind,
        **_products(kind, dtype, numerics),
        **{library: version(library) for library in libraries},
    }


def products_id(weights: str) -> bytes:
    """Returns an id of what tests of single products depend on, besides the product's own shape and types: of no model,
    so that models and parts of models with equal shapes share what was found.

    Args:
        weights: as for `computing`.
    """
    return digest(b"satchel.products", weights.encode(), version("mlx").encode())


def _dequantizes(kind: str, weights: str) -> bool:
    return kind == "cuda" and weights.partition(",")[0] == "stored"


def _products(kind: str, dtype: str, numerics: str) -> dict[str, str]:
    """Returns the property of a device that decides how products are rounded."""
    if kind == "cpu":
        return {"blas": name} if (name := blas.chosen().name) else {}
    if kind == "cuda":
        return mlx_rounding()
    if dtype.startswith("float32") and not multiplies_exactly(mx.float32):
        return {"products": "tf32"}
    # Tensor units add in another order.
    return {"products": "by tensor units"} if numerics == "reproducible" and has_tensor_units() else {}


def refuse_elsewhere(source: str, config: Mapping[str, object]) -> None:
    """Refuses a model that would read weights that its id does not include.

    Raises:
        ModelLoadError: the model would read such weights.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("ple_storage"):
        raise ModelLoadError(f"{source} keeps weights in files of their own kind (ple_storage), which is not supported")


def _is_ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _NOT_READ)
