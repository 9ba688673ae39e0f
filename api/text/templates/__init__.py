"""Chat templates: what they write, what they forget, and what they have no place for. Computation only."""
