"""KV as arrays: MLX's caches, the block pool, attention on sealed blocks, and the prefix cache."""
