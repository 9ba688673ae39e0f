"""How much of each turn is found in the cache with published chat templates, over recorded sessions of agents."""
