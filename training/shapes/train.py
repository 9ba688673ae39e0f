"""Trains the vision model on one GPU and writes it in the Hugging Face layout.

    python -m training.shapes.train --out DIR --tokenizer actors/model_files/embedded/shapes

Every picture is drawn once and never again. The same seed gives the same chats whatever the number of workers; where
`--seconds` ends the training, the machine's speed decides after how many of them.
"""

# PyTorch is needed for training only and is not among the project's requirements.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .data import ChatRow, TrainingBatch, make_rows, pack
from .layout import PictureModelShape, write_configs
from .model import Borders, Inputs, Shapes, grid_positions

LEVELS = (600, 1200)  # the first steps with the plainest chats, and those up to which they are plain


class Chats(IterableDataset[dict[str, Tensor]]):
    """Batches for every step in order, each field of `TrainingBatch` a tensor."""

    def __init__(self, folder: Path, first: int, steps: int, patches: int, seed: int) -> None:
        self.folder, self.first, self.steps, self.patches, self.seed = folder, first, steps, patches, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        offset, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        torch.set_num_threads(1)
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        for step in range(self.first + offset, self.steps, stride):
            level = sum(step >= end for end in LEVELS)
            yield tensors(pack(make_rows(f"{self.seed}/{step}", tokenizer, level, self.patches)))


def tensors(batch: TrainingBatch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(getattr(batch, name)) for name in TrainingBatch.__slots__}


def inputs_of(batch: dict[str, Tensor], shape: PictureModelShape, device: str) -> Inputs:
    """The batch on the device, with what follows from its grids."""
    grids = [(rows, columns) for rows, columns in batch["grids"].tolist()]
    parts = [grid_positions(*grid, shape.places) for grid in grids]
    corners, weights, places = (torch.cat(part) for part in zip(*parts, strict=True))
    sizes = [rows * columns for rows, columns in grids]
    ends = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def move(values: Tensor) -> Tensor:
        return values.to(device, non_blocking=True)

    starts = batch["starts"]
    return Inputs(
        tokens=move(batch["tokens"]),
        seen=move(batch["seen"].nonzero()[:, 0]),
        positions=move(batch["positions"]),
        frames=move(batch["frames"]),
        pairs=move(batch["pairs"]),
        corners=move(corners),
        weights=move(weights),
        places=move(places),
        chats=Borders(move(starts), int(starts.diff().max()), causal=True),
        pictures=Borders(move(ends), max(sizes, default=1), causal=False),
    )


def write_model(model: Shapes, folder: Path) -> None:
    """Writes the weights as bfloat16 beside the configuration."""
    write_configs(folder, model.shape)
    weights = {name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


@torch.no_grad()
def exactness(model: Shapes, rows: list[ChatRow], device: str) -> dict[str, tuple[int, int]]:
    """Replies said exactly and all replies, by kind: greedy, with the chat so far as it should be."""
    batch = tensors(pack(rows))
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hits = model.logits(model.hidden(inputs_of(batch, model.shape, device))).argmax(-1).cpu()
    hits = hits[:-1] == batch["tokens"][1:]
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for row, start in zip(rows, batch["starts"].tolist()[:-1], strict=True):
        for first, last, kind in row.replies:
            total[kind] += 1
            right[kind] += int(hits[start + first - 1 : start + last - 1].all())
    return {kind: (right[kind], total[kind]) for kind in sorted(total)}


def report(model: Shapes, options: argparse.Namespace, batches: int, device: str) -> None:
    """Prints how many replies to new chats are exact."""
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for part in range(batches):
        rows = make_rows(f"report/{options.seed}/{part}", tokenizer, 2, options.patches)
        for kind, (hits, count) in exactness(model, rows, device).items():
            right[kind] += hits
            total[kind] += count
    shown = "  ".join(f"{kind} {right[kind]}/{total[kind]}" for kind in sorted(total))
    print(f"exact: {right.total() / total.total():.4f}  {shown}", flush=True)


def optimizer_of(model: Shapes, rate: float) -> torch.optim.AdamW:
    matrices = [value for value in model.parameters() if value.dim() >= 2]
    vectors = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def losses(model: Shapes, inputs: Inputs, places: Tensor) -> Tensor:
    """Cross entropy in nats of every token that the model is to say, at these places."""
    logits = model.logits(model.hidden(inputs)[places - 1]).float()
    return functional.cross_entropy(logits, inputs.tokens[places], reduction="none")


def train(model: Shapes, options: argparse.Namespace, device: str) -> None:
    """Runs all steps, or until `options.seconds` are over; writes the model every thousand steps."""
    started = time.monotonic()
    optimizer = optimizer_of(model, options.rate)
    first = options.first_step
    data = Chats(options.out, first, options.steps, options.patches, options.seed)
    ahead = 3 if options.workers else None
    loader = DataLoader(data, None, num_workers=options.workers, prefetch_factor=ahead, pin_memory=device == "cuda")
    waited, pictures, mark = 0.0, 0, time.monotonic()
    for step, batch in enumerate(loader, first):
        waited += time.monotonic() - mark
        seconds = time.monotonic() - started
        part = min(1.0, max((step - first) / (options.steps - first), seconds / options.seconds))
        rate = options.rate * min(1.0, (step - first + 1) / 300) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        said = batch["said"].nonzero()[:, 0].to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = losses(model, inputs_of(batch, model.shape, device), said).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pictures += len(batch["grids"])
        if step % options.log == 0 or part >= 1:
            print(
                f"step {step} loss {loss.item():.4f} rate {rate:.5f} {pictures} pictures and pairs of frames, "
                f"{seconds:.0f} s, waited {waited:.0f} s",
                flush=True,
            )
        if step > first and step % 1000 == 0:
            write_model(model, options.out)
            report(model, options, 4, device)
        if part >= 1:
            break
        mark = time.monotonic()
    write_model(model, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the embedded vision model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder to copy the tokenizer's files from")
    parser.add_argument("--start", type=Path, help="folder with weights to begin with")
    parser.add_argument("--first-step", type=int, default=0, help="number of the first step; chats follow from it")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--patches", type=int, default=32768, help="patches a step")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 2) - 1))
    parser.add_argument("--log", type=int, default=100, help="steps between two lines of output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(options.tokenizer / name, options.out / name)
    torch.manual_seed(options.seed)
    model = Shapes(PictureModelShape()).to(options.device)
    if options.start is not None:
        model.load_state_dict(load_file(str(options.start / "model.safetensors"), device=options.device))
    print(f"{sum(value.numel() for value in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    train(model, options, options.device)
    report(model, options, 12, options.device)


if __name__ == "__main__":
    main()
