"""Whether a node's processes have ended, seen at once where its machine still answers.

A process that was killed leaves a closed port behind, which refuses whoever connects. A machine that is cut off, or has
no power, leaves silence; that is noticed by the reports that the router misses.
"""

from __future__ import annotations

import asyncio

import ray
from ray.exceptions import RayError

from ..cluster.nodes import Node

TABLE_S = 2.0
CONNECT_S = 0.5
"""How long Ray may take to say where its part of a node listens, and that one to take a connection."""


async def has_ended(node: str) -> bool:
    """Whether nothing of the cluster runs on that node any more. False where that cannot be told now."""
    try:
        async with asyncio.timeout(TABLE_S):
            ports = await asyncio.to_thread(_ports, Node(name=node).resource)
    except (RayError, RuntimeError, TimeoutError):
        return False
    return all(await asyncio.gather(*(_refuses(host, port) for host, port in ports)))


def _ports(resource: str) -> list[tuple[str, int]]:
    """Where the Ray processes listen that offer this resource, as far as Ray knows; none once it knows of their end."""
    return [
        (node["NodeManagerAddress"], node["NodeManagerPort"])
        for node in ray.nodes()
        if node["Alive"] and resource in node["Resources"]
    ]


async def _refuses(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
