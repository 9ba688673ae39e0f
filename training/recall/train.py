"""Trains the embedded text model on one GPU and writes it in the Hugging Face layout.

    python -m training.recall.train --out DIR

The folder must hold the tokenizer's files or they are made first. Rows grow from 512 to 8,192 tokens; every row is a
new conversation. The same seed gives the same rows whatever the number of workers.
"""

# PyTorch is needed for training only and is not among the project's requirements.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from . import tokenizer as tokenizer_module
from .data import READ, SAID, make_batch
from .layout import RecallShape, write_configs
from .model import Layer, Recall, losses

LENGTHS = (512, 1024, 4096, 8192)
# (share of all tokens, how likely each of LENGTHS is within it)
STAGES = [
    (0.25, (1.00, 0.00, 0.00, 0.00)),
    (0.20, (0.25, 0.75, 0.00, 0.00)),
    (0.27, (0.15, 0.25, 0.60, 0.00)),
    (0.28, (0.10, 0.15, 0.25, 0.50)),
]


def length_of_step(step: int, steps: int, seed: int, stages: list[tuple[float, tuple[float, ...]]]) -> int:
    """The row length of a training step, in tokens."""
    place, total = (step + 0.5) / steps, 0.0
    for share, weights in stages:
        total += share
        if place < total:
            return random.Random(f"{seed}/length/{step}").choices(LENGTHS, weights)[0]
    return random.Random(f"{seed}/length/{step}").choices(LENGTHS, stages[-1][1])[0]


class Conversations(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of (tokens, roles), both (rows, length + 1), for every step in order."""

    def __init__(self, folder: Path, lengths: list[int], batch: int, seed: int) -> None:
        self.folder, self.lengths, self.batch, self.seed = folder, lengths, batch, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        for step in range(first, len(self.lengths), stride):
            length = self.lengths[step]
            tokens, roles, _ = make_batch(f"{self.seed}/{step}", tokenizer, self.batch // length, length)
            yield torch.from_numpy(tokens), torch.from_numpy(roles)


def write_model(model: Recall, folder: Path) -> None:
    """Writes the weights as bfloat16 beside the configuration."""
    write_configs(folder, model.shape)
    weights = {name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


@torch.no_grad()
def exactness(model: Recall, tokenizer: Tokenizer, seed: str, rows: int, length: int) -> dict[str, tuple[int, int]]:
    """Replies said exactly and all replies, by kind: greedy, with the conversation so far as it should be."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    at_once = max(1, 65536 // length)
    for part in range(0, rows, at_once):
        tokens, _, made = make_batch(f"{seed}/{part}", tokenizer, min(at_once, rows - part), length)
        ids = torch.from_numpy(tokens).long().cuda()
        with torch.autocast("cuda", torch.bfloat16), torch.compiler.set_stance("force_eager"):
            hits = model(ids[:, :-1]).argmax(-1) == ids[:, 1:]
        hits = hits.cpu()
        for index, row in enumerate(made):
            for start, stop, kind in row.replies:
                total[kind] += 1
                right[kind] += int(hits[index, start - 1 : stop - 1].all())
    return {kind: (right[kind], total[kind]) for kind in sorted(total)}


def optimizer_of(model: Recall, rate: float) -> torch.optim.AdamW:
    matrices = [value for value in model.parameters() if value.dim() == 2]
    vectors = [value for value in model.parameters() if value.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


def train(model: Recall, options: argparse.Namespace) -> None:
    """Runs all steps, or stops when `options.seconds` are over; writes the model every thousand steps."""
    started = time.monotonic()
    steps = int(options.tokens // options.batch)
    stages = STAGES[options.first_stage :]
    scale = sum(share for share, _ in stages)
    stages = [(share / scale, weights) for share, weights in stages]
    lengths = [length_of_step(step, steps, options.seed, stages) for step in range(steps)]
    data = Conversations(options.out, lengths, options.batch, options.seed)
    loader = DataLoader(data, batch_size=None, num_workers=options.workers, prefetch_factor=6, pin_memory=True)
    optimizer = optimizer_of(model, options.rate)
    warm = min(300, steps // 10 + 1)
    compiled_losses = torch.compile(losses, dynamic=False)
    seen, waited, mark = 0, 0.0, time.monotonic()
    for step, (tokens, roles) in enumerate(loader):
        waited += time.monotonic() - mark
        late = time.monotonic() - started > options.seconds
        part = step / steps
        rate = options.rate * min(1.0, (step + 1) / warm) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = tokens.cuda(non_blocking=True).long()
        roles = roles.cuda(non_blocking=True)[:, 1:].flatten()
        reading = options.reading * (1 - 0.8 * part)
        weights = (roles == SAID).float() + reading * (roles == READ).float()
        with torch.autocast("cuda", torch.bfloat16):
            each = compiled_losses(model.hidden(ids[:, :-1]), model.model.embed_tokens.weight, ids[:, 1:].contiguous())
        loss = (each * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += ids.numel()
        if step % options.log == 0 or step + 1 == steps or late:
            saying = each[roles == SAID].mean().item()
            seconds = time.monotonic() - started
            print(
                f"step {step}/{steps} length {lengths[step]} loss {loss.item():.4f} said {saying:.4f} "
                f"{seen / 1e6:.0f}M tokens {seconds:.0f} s waited {waited:.0f} s",
                flush=True,
            )
        if step and step % 1000 == 0:
            write_model(model, options.out)
            if step % 4000 == 0:
                report(model, options, 256)
        if late:
            break
        mark = time.monotonic()


def report(model: Recall, options: argparse.Namespace, rows: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Prints and returns how many replies are exact at each row length."""
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for length in LENGTHS:
        found[str(length)] = exactness(model, tokenizer, f"report/{length}", max(8, rows * 512 // length), length)
        shown = "  ".join(f"{kind} {right}/{total}" for kind, (right, total) in found[str(length)].items())
        print(f"exact at {length}: {shown}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains the embedded text model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--tokenizer", type=Path, help="folder to copy the tokenizer's files from")
    parser.add_argument("--start", type=Path, help="folder with weights to begin with")
    parser.add_argument("--first-stage", type=int, default=0, help="begin with this stage, 0 to 3")
    parser.add_argument("--tokens", type=float, default=2.1e9, help="tokens to train on")
    parser.add_argument("--batch", type=int, default=131072, help="tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--reading", type=float, default=0.1, help="first weight of tokens that are only read")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--log", type=int, default=200, help="steps between two lines of output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tokenizer is not None:
        for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]:
            shutil.copyfile(options.tokenizer / name, options.out / name)
    elif not (options.out / "tokenizer.json").exists():
        texts = tokenizer_module.sample_texts(random.Random(options.seed), 2000)
        tokenizer_module.write(tokenizer_module.train(texts), options.out)
    model = Recall(RecallShape()).cuda()
    if options.start is not None:
        model.load_state_dict(load_file(str(options.start / "model.safetensors")))
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        layer.compile(dynamic=False)
    train(model, options)
    write_model(model, options.out)
    model.load_state_dict(load_file(str(options.out / "model.safetensors")))
    found = report(model, options, 2048)
    probe = torch.arange(64, device="cuda")[None] * 7
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = functional.log_softmax(model(probe)[0, -1].float(), -1)
    summary = {"exact": found, "probe": logits[:32].tolist()}
    (options.out / "report.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
