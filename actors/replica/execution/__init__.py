"""The MLX side of a replica: loading a model, prefill, batched decode, sampling, vision."""
