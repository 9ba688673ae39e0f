"""Does a loaded model compute as the bare model does, and what does KV quantization change of it."""
