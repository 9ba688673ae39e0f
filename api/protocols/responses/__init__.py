"""OpenAI's Responses and Conversations, on top of its chat; responses that are kept."""
