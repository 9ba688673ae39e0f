"""KV on the disk of a node: segment files, their index, eviction and recovery."""
