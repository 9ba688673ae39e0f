"""Tensor parallelism: each process of a group has a share of every layer, and all exchange sums twice in each layer."""
