"""Agents' memory: branches, epochs, primaries and claims. Pure, except the SQLite file (`database.py`)."""
