"""Copying KV blocks between nodes: mutual authentication, encryption, pulls that resume."""
