"""How a model's decode steps are computed on this device: ways that are tried when it is loaded."""
