"""KV in arrays: MLX's caches, sealed blocks, attention on them, and the prefixes that are kept."""
