"""How quantized KV changes models' predictions on real text."""
