"""Drafts: which tokens a sequence may have next, and whether it pays to compute several at once. Pure."""
