"""How the models that ship were made; each folder or file makes one, run with `python -m` from the root."""
