"""KV on the disk of a node: segment files, their index, and what goes first."""
