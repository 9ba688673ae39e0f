"""Papers' own experiments, run by name on this machine: `python -m benchmarks.papers.run`."""
