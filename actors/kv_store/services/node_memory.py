"""A node's own memory: the database of transcripts, KV on disk, and the tenants' limits on both."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from ....cluster.config.config import Config
from ....cluster.config.timing import Timing
from ....cluster.keys import OWNER
from ...protocol.block_ids import is_shared, root_id, scope_of
from ..agents.agents import Agents
from ..agents.branches import AgentLimits
from ..agents.database import AgentDatabase
from ..agents.roles import RoleTable
from ..disk.quotas import Quotas
from ..disk.store import DiskLimits
from .disk import NodeDisk
from .work import Work

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeMemory:
    """The database of transcripts, KV on disk, and the tenants' limits on both. `folder` holds all of it; None if it is
    in memory."""

    database: AgentDatabase
    agents: Agents
    roles: RoleTable
    quotas: Quotas
    disk: NodeDisk
    work: Work
    timing: Timing
    folder: Path | None = None


def open_memory(config: Config, folder: Path | None) -> NodeMemory:
    """
    Args:
        folder: of all files. None keeps transcripts in memory for the life of this process, and no KV.

    Raises:
        ClusterError: the folder cannot be used, or belongs to a newer version.
    """
    quotas = Quotas(lambda tenant: agents.nbytes_of(tenant), OWNER)
    limits = DiskLimits(
        bytes_max=config.disk_bytes_max,
        reserve_bytes=config.disk_reserve_bytes,
        lease_s_max=config.timing.block_lease_s,
    )
    disk = NodeDisk(folder, limits, lambda ask: work.in_order(lambda: ask(agents)), quotas, config.timing)
    database = AgentDatabase(folder)

    def root_of(agent: str, model: bytes) -> bytes:
        tenant, _, name = agent.partition("/")
        # Blocks with the scope of one request are not shared, so no later turn finds them.
        scope = scope_of(config.share, tenant, name, "")
        return root_id(model, scope) if is_shared(scope) else b""

    agents = Agents(
        database,
        AgentLimits(branches_max=config.branches_max, bytes_max=config.transcripts_bytes_max),
        root_of,
        # A million sequence numbers per second of the clock, so they keep growing even if the file is recreated.
        start=int(time.time()) << 20,
        on_let_go=_say_let_go,
    )
    work = Work(database, ready=disk.ready, make_room=disk.make_room)
    roles = RoleTable(database, agents.end_turn)
    return NodeMemory(database, agents, roles, quotas, disk, work, config.timing, folder)


def _say_let_go(agent: str) -> None:
    logger.warning("agent %s is evicted: others need the room (transcripts_bytes_max)", agent)
