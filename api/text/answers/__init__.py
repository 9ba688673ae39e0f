"""How a model writes: characters, reasoning, stops, tool calls, logprobs, grammars that bind it. Computation only."""
