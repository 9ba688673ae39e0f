"""Ollama's API, on top of OpenAI's; and what a model's files say of it."""
