"""Pictures, videos and audio: fetched, decoded, and put into prompts."""
