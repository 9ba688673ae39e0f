"""Decides which replica answers a request. Pure, but for the actor."""
