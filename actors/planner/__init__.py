"""Divides models that no node holds: which layers go to which node. One actor on the head."""
