"""An agent that does not read twice: the official OpenAI client, and one header that names the agent."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = []
for text in ["Remember: the code of ada is 1815.", "Tell me a story.", "What is the code of ada?"]:
    messages.append({"role": "user", "content": text})
    answer = client.chat.completions.create(
        model="satchel/recall", messages=messages, extra_headers={"X-Agent-ID": "scribe"}
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    usage = answer.usage
    print(
        f"{usage.prompt_tokens:4} tokens, {usage.prompt_tokens_details.cached_tokens:4} of them from memory:",
        messages[-1]["content"][:40],
    )
