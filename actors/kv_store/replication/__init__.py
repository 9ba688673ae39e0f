"""Agents on several nodes: which node is the primary, which are secondaries, which is promoted after a loss."""
