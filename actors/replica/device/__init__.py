"""What a replica computes on: its kind, memory, streams and errors, and what multiplies on a CPU."""
