"""What quantized KV does to what models say of real text."""
