"""Which row does what in the next step, and whose turn it is. Pure."""
