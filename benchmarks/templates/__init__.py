"""How much of each turn is found again with published chat templates, over recorded sessions of agents."""
