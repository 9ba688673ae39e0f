"""Agents' memory: branches, epochs, homes and claims. Pure, but for the SQLite file: database, rows and schema."""
