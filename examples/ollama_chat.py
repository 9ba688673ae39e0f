"""Ollama's client finds the served models, and talks to one."""

from ollama import Client

client = Client(host="http://127.0.0.1:8000")
print(sorted(model.model for model in client.list().models))
answer = client.chat("satchel/recall", [{"role": "user", "content": "Remember: the code of ada is 1815."}])
print(answer.message.content)
