"""The MLX side of a replica: prefill, batched decode, drafts, hidden states; its rooms have media, recorded steps and
sampling. Only micro_batches and padding are pure."""
