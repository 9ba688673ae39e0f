"""KV as arrays: MLX's caches, sealed blocks, attention on them, and the prefix cache."""
