"""The store of a node: agents' transcripts and token ids, and their KV on disk."""
