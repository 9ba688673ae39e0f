"""Sealed blocks and what computes with their codes: GPU kernels, and the same in MLX's own operations."""
