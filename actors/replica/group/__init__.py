"""A replica whose layers are divided among several processes, on several nodes: stages, connections, and calls."""
