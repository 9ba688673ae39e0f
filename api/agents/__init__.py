"""Agents' memory around a request: recalled before it, committed at its end."""
