"""The store's actor in this process: alone, and called as everybody calls it."""

from __future__ import annotations

from pathlib import Path

from satchel.actors.kv_store.actor import KVStoreActor
from satchel.actors.kv_store.services.composition import StoreServices
from satchel.actors.kv_store.services.node_memory import open_memory
from satchel.actors.protocol.store_client import StoreClient
from satchel.cluster.config.config import Config
from satchel.cluster.config.nodes import Node

from ..direct import Direct


class NoPeers:
    """A cluster of one node."""

    async def others(self) -> list[str]:
        return []

    def client(self, node: str) -> StoreClient:
        raise AssertionError(f"there is no node {node}")


class LoneStore(KVStoreActor):
    """Takes turns at once, and shares no KV. Make it on an event loop.

    Attributes:
        client: calls it.
    """

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self, config: Config, folder: str | Path | None = None
    ) -> None:
        memory = open_memory(config, Path(folder) if folder is not None else None)
        self.services = StoreServices(config, Node(name="local"), memory, NoPeers(), bytes(32))
        self.services.tending.introduced.set()
        self.client = StoreClient("local", config.timing, Direct(lambda: self))

    def close(self) -> None:
        """As the end of its process does."""
        memory = self.services.memory
        # Behind what is still being done: SQLite does not survive being closed under it.
        memory.work.thread.submit(memory.database.close).result()
        if memory.disk.store is not None:
            memory.disk.store.close()
