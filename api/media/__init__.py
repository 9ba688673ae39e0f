"""Pictures and films: fetched, decoded, and put into prompts."""
