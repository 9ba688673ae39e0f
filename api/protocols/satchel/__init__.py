"""Satchel's own routes: agents, the cluster, status."""
