import os
from typing import Literal

import litellm
from pydantic import BaseModel

server = os.environ["SERVER"]
ASKED = {"role": "user", "content": "Please read the file /note.txt"}


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
tools = [{"type": "function", "function": {"name": "read_file", "parameters": parameters}}]
for model, base in (("openai/satchel/script", server + "/v1"), ("anthropic/satchel/script", server)):
    given = {"model": model, "api_base": base, "api_key": "none", "tools": tools}
    first = litellm.completion(messages=[ASKED], **given)
    (call,) = first.choices[0].message.tool_calls
    thread = [ASKED, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "the heron sleeps"}]
    assert litellm.completion(messages=thread, **given).choices[0].message.content == "It says: the heron sleeps"
    parts = litellm.completion(messages=thread, stream=True, **given)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "It says: the heron sleeps"
    told = {**given, "tools": None, "messages": [{"role": "user", "content": "Who is it?"}]}
    Person.model_validate_json(litellm.completion(response_format=Person, **told).choices[0].message.content)
