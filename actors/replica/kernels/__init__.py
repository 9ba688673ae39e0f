"""Sealed blocks, and the code that computes with them: GPU kernels, and the same in MLX's own operations."""
