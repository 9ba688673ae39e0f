"""The store of a node: agents' words, and their KV on disk."""
