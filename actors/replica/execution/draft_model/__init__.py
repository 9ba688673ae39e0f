"""Drafts by a small model of the same tokenizer: its KV of each sequence's last tokens, and what it says comes next."""
