"""The formats in which models write calls, each one class: recognised, bound, parsed, written. Computation only."""
