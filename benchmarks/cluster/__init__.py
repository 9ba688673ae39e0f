"""Several nodes: moving KV, first tokens after a move, recovery."""
