"""An answer that keeps to a JSON schema: every token is masked by it."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {"code": {"type": "string", "pattern": "^[0-9]{4}$"}, "sure": {"type": "boolean"}},
    "required": ["code", "sure"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model="satchel/recall",
    messages=[{"role": "user", "content": "Remember: the code of ada is 1815."}],
    response_format={"type": "json_schema", "json_schema": {"name": "code", "schema": schema}},
)
print(json.loads(answer.choices[0].message.content))
