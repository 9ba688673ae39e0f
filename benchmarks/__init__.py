"""What Satchel measures of itself and beside others; each folder is a benchmark, run with `python -m` from the root."""
