"""OpenAI's wire format, the Responses API: bodies and items in; bodies, items and events out."""
