"""The node that has the blocks: serves a chain of them, and as many raw bytes on another port.

    python -m benchmarks.cluster.source FOLDER

Asked with a line of JSON (`key`, `address`, `blocks`), it answers with another one and serves until its standard input
closes; asked for `"cpu"`, with the seconds that it has computed. See `worker.py`.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from satchel.actors.kv_store.disk.segments import grouped, write_segment
from satchel.actors.kv_store.disk.store import DiskLimits, DiskStore
from satchel.actors.kv_store.transfer.block_server import BlockServer
from satchel.actors.protocol.block_ids import BLOCK_TOKENS, block_id, root_id
from satchel.actors.protocol.entries import Entry

from .worker import answer

LAYERS, KV_HEADS, DIM = 32, 8, 128
"""Of Llama-3.1-8B."""

MODEL = bytes(32)
ROOT = root_id(MODEL, "tenant:bench")
SESSION = "bench"
RAW_PIECE_BYTES = 2**20


def block_parts(number: int) -> dict[str, np.ndarray]:
    """Arrays of the shapes that a sealed block has: codes, scales and biases of keys and of values."""
    rng = np.random.default_rng(number)
    groups = {"key": (DIM, BLOCK_TOKENS), "value": (BLOCK_TOKENS, DIM)}
    parts: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in groups.items():
            parts[f"{layer}.{name}_codes"] = rng.integers(0, 2**32, (1, KV_HEADS, rows, columns // 8), np.uint32)
            for more in ("scales", "biases"):
                shape = (1, KV_HEADS, rows, columns // 64)
                parts[f"{layer}.{name}_{more}"] = rng.integers(0, 2**16, shape, np.uint16)
    return parts


def open_store(root: Path) -> DiskStore:
    return DiskStore(root, session=SESSION, limits=DiskLimits(bytes_max=2**40))


def fill(store: DiskStore, blocks: int) -> tuple[list[bytes], int]:
    """The ids of a chain of `blocks` blocks, and their bytes."""
    parent, entries = ROOT, []
    for number in range(blocks):
        tokens = [number] * BLOCK_TOKENS
        parent, before = block_id(parent, tokens), parent
        entries.append(Entry(parent, before, tokens, block_parts(number)))
    for group in grouped(entries):
        told = {"session": SESSION, "epoch": store.epoch, "now_s": time.time()}
        store.commit(write_segment(store.root, store.key, MODEL, group, **told))
    return [entry.id for entry in entries], sum(part.nbytes for entry in entries for part in entry.parts.values())


def _send_raw(listener: socket.socket, nbytes: int) -> None:
    piece = memoryview(secrets.token_bytes(RAW_PIECE_BYTES))
    while True:
        sock, _ = listener.accept()
        with sock:
            for start in range(0, nbytes, RAW_PIECE_BYTES):
                sock.sendall(piece[: nbytes - start])


def main() -> None:
    with ExitStack() as stack:
        store = stack.enter_context(open_store(Path(sys.argv[1])))

        def serve(asked: Any) -> Any:
            if asked == "cpu":
                return time.process_time()
            ids, nbytes = fill(store, asked["blocks"])
            listener = socket.create_server((asked["address"], 0))
            threading.Thread(target=_send_raw, args=(listener, nbytes), daemon=True).start()
            key, listen = bytes.fromhex(asked["key"]), [(asked["address"], 0)]
            server = stack.enter_context(closing(BlockServer(store, key, "source", listen)))
            told = {"ids": [block.hex() for block in ids], "bytes": nbytes, "raw": listener.getsockname()}
            return {**told, "addresses": server.addresses}

        answer(serve)


if __name__ == "__main__":
    main()
