"""Between text and token ids: tokenizer, chat template, continuation, what templates forget. Answers are read in
`answers`."""
