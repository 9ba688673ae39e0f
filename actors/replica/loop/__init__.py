"""A step of the engine, on its thread: commands, pictures, prefill, decode, delivery, recovery."""
