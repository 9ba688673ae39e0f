"""LoRA adapters by request: sequences with different adapters, or none, in one call of the model."""
