"""Answers, agents and the cluster as clients see them, by HTTP or Python."""
