"""Anthropic's wire format, the Messages API: bodies in, bodies, events and errors out."""
