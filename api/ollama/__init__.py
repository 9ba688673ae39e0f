"""Ollama's wire format: bodies in, answers, lines of streams, models and errors out."""
