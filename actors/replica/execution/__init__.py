"""The MLX side of a replica: prefill, batched decode, sampling, vision."""
