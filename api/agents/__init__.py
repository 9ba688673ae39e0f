"""Agents' memory as a request sees it: recalled before it, kept when it ends."""
