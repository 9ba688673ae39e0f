"""OpenAI's Responses and Conversations APIs, on top of chats, and stored responses."""
