"""Loads and unloads the models that come and go. What is unloaded for what is decided by `policy`, which is pure."""
