"""Pictures and videos: fetched, decoded, and put into prompts."""
