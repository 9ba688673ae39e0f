"""Commands that talk to the endpoint, or start programs that do."""
