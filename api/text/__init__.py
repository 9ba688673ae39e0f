"""Between text and token ids: tokenizer, continuation, callers' texts. Conversations are rendered in `templates`, and
answers are read in `answers`."""
