"""Tiny checkpoints of every model type that mlx-lm and mlx-vlm have, and a check of how each is served."""
