"""Kernels that are compiled, and shapes that are met, before a request needs them."""
