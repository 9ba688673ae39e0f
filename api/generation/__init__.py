"""A request: who asks, what is asked, and the rows that are computed for it."""
