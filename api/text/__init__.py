"""Conversion between text and token ids: tokenizer, continuation, callers' texts. `templates` renders conversations,
and `answers` reads answers."""
