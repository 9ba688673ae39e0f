"""OpenAI's wire format: bodies in, bodies and events out."""
