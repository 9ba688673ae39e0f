"""From a request to an answer: its prompt, the sequences that are started for it, and the text that they become."""
