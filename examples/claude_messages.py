"""Anthropic's Messages API, streamed, with Anthropic's client."""

from anthropic import Anthropic

client = Anthropic(base_url="http://127.0.0.1:8000", api_key="none")
with client.messages.stream(
    model="satchel/recall",
    max_tokens=40,
    messages=[{"role": "user", "content": "Remember: the code of ada is 1815. What is the code of ada?"}],
    extra_headers={"X-Agent-ID": "reader"},
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
