"""Ollama's API, on top of OpenAI's, and facts from a model's files."""
