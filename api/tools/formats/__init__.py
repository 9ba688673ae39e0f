"""The formats in which models write calls, one class each: recognised, constrained, parsed, written. Computation
only."""
