"""Tiny checkpoints of the model types that mlx-lm and mlx-vlm build, and what becomes of each when it is served."""
