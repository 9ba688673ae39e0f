"""The replicas of one model as arrays, so that a decision among a thousand takes a few operations. Pure. A *row* is one
replica's index in these arrays; it has nothing to do with sequences in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from .directory import Directory
from .load import ReplicaState
from .nodes import NodeTable


class Columns:
    """The figures of a model's replicas as arrays `(replicas,)`: indices as `intp`, `moves_kv` as `bool`, the rest as
    `float64`. Built again if a replica joins or leaves; `refresh` updates one row.

    Args:
        states: the replicas, sorted by name.
    """

    def __init__(self, states: Sequence[ReplicaState], directory: Directory, nodes: NodeTable) -> None:
        self.states = list(states)
        self.names = [state.name for state in states]
        self.rows = {name: row for row, name in enumerate(self.names)}
        count = len(states)
        self.memory = np.array([directory.index(name) for name in self.names], np.intp)
        """The index of each one's memory in `Directory.runs`."""
        self.node = np.array([nodes.index(state.node) for state in states], np.intp)
        """The index of each one's node, -1 if it is unknown."""
        self.model_ids = sorted({state.model_id for state in states})
        self.model = np.array([self.model_ids.index(state.model_id) for state in states], np.intp)
        """The index of each one's model id in `model_ids`."""
        self.seen, self.queue_s, self.decode_s = np.empty(count), np.empty(count), np.empty(count)
        self.token_s, self.restore_token_s, self.kv_bytes = np.empty(count), np.empty(count), np.empty(count)
        self.free_bytes, self.last_assigned = np.empty(count), np.empty(count)
        self.encode_token_s, self.step_s = np.empty(count), np.empty(count)
        self.prefill_token_j, self.decode_token_j = np.empty(count), np.empty(count)
        self.moves_kv = np.empty(count, bool)
        for state in states:
            self.refresh(state)

    def refresh(self, state: ReplicaState) -> None:
        """Updates a replica's row after a report."""
        row = self.rows[state.name]
        self.token_s[row], self.restore_token_s[row] = state.token_s, state.restore_token_s
        self.kv_bytes[row], self.free_bytes[row] = state.kv_bytes, state.free_bytes
        self.encode_token_s[row], self.step_s[row] = state.encode_token_s, state.step_s
        self.moves_kv[row] = state.moves_kv
        self.prefill_token_j[row], self.decode_token_j[row] = state.prefill_token_j, state.decode_token_j
        self.refresh_load(state)

    def refresh_load(self, state: ReplicaState) -> None:
        """Updates the load and liveness in a replica's row."""
        row = self.rows[state.name]
        self.seen[row] = -inf if state.voice.lost else state.voice.seen
        self.queue_s[row], self.decode_s[row] = state.queue_s, state.decode_s
        self.last_assigned[row] = state.last_assigned

    def check(self, directory: Directory, nodes: NodeTable) -> None:
        """Checks every row against its replica.

        Raises:
            AssertionError: a row is out of date.
        """
        fresh = Columns(self.states, directory, nodes)
        for name, array in vars(fresh).items():
            if isinstance(array, np.ndarray):
                assert (array == getattr(self, name)).all(), f"{name} is out of date"
