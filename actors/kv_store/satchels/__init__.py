"""Agents as files that can be carried to another cluster: the format, what is packed, and what is taken in."""
