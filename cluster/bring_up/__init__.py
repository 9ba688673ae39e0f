"""From nothing to a running cluster and back: Ray's processes, other machines, and what looks after them."""
