"""Starts and ends a cluster: Ray's processes, other machines, and what supervises them."""
