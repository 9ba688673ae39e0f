"""Tests whether a loaded model computes what the bare model does, and measures what KV quantization changes."""
