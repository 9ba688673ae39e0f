import os
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=os.environ["SERVER"] + "/v1")
MODEL = "satchel/script"
ASKED = {"role": "user", "content": "Please read the file /note.txt"}
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


# Chat: a tool loop, a stream, and a parsed answer.
tool = {"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS, "strict": True}}
first = client.chat.completions.create(model=MODEL, messages=[ASKED], tools=[tool])
(call,) = first.choices[0].message.tool_calls
assert '"/note.txt"' in call.function.arguments
result = {"role": "tool", "tool_call_id": call.id, "content": "the heron sleeps"}
thread = [ASKED, first.choices[0].message, result]
second = client.chat.completions.create(model=MODEL, messages=thread, tools=[tool])
assert second.choices[0].message.content == "It says: the heron sleeps"
with client.chat.completions.stream(model=MODEL, messages=thread, tools=[tool]) as stream:
    assert stream.get_final_completion().choices[0].message.content == "It says: the heron sleeps"
told = [{"role": "user", "content": "Who is it?"}]
parsed = client.chat.completions.parse(model=MODEL, messages=told, response_format=Person)
assert isinstance(parsed.choices[0].message.parsed, Person)

# Responses: the same.
tool = {"type": "function", "name": "read_file", "parameters": PARAMETERS, "strict": True}
first = client.responses.create(model=MODEL, input=[ASKED], tools=[tool])
(call,) = [item for item in first.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": "the heron sleeps"}
second = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[tool])
assert second.output_text == "It says: the heron sleeps"
with client.responses.stream(model=MODEL, input=[ASKED, *first.output, result], tools=[tool]) as stream:
    assert stream.get_final_response().output_text == "It says: the heron sleeps"
assert isinstance(client.responses.parse(model=MODEL, input=told, text_format=Person).output_parsed, Person)
