"""Chat templates: what they write, what they drop, and what they have no place for. Computation only."""
