"""A tool call and its result, with the model that says what its script says."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
tools = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]
messages = [{"role": "user", "content": "Please read the file /etc/motd"}]
answer = client.chat.completions.create(model="satchel/script", messages=messages, tools=tools)
call = answer.choices[0].message.tool_calls[0]
print(call.function.name, json.loads(call.function.arguments))

messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Welcome to studio."}]
answer = client.chat.completions.create(model="satchel/script", messages=messages, tools=tools)
print(answer.choices[0].message.content)
