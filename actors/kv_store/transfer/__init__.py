"""Blocks from node to node: proof of the cluster's key, encryption, pulls that resume."""
