"""A model's answers: characters, reasoning, stops, tool calls, logprobs, and grammars that constrain them. Computation
only."""
