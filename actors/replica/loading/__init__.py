"""Loading a model: its files, what its weights become, and how it computes here."""
