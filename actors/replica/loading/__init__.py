"""Loads a model: its files, the form of its weights, and how it computes on this device."""
