"""The device that a replica computes on: its kind, memory, streams and errors, and the BLAS of a CPU."""
