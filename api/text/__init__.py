"""Between text and token ids: tokenizer, continuation, stops, reasoning, tool calls, logprobs."""
