"""Decode steps as recorded graphs, and what is left to kernels while a step is recorded."""
