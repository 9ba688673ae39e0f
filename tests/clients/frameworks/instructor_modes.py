import os
from typing import Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel, ConfigDict

server = os.environ["SERVER"]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


def ask(client: instructor.Instructor, prompt: str, **more: int) -> None:
    messages = [{"role": "user", "content": prompt}]
    said = client.chat.completions.create(
        model="satchel/script", response_model=Person, messages=messages, max_retries=1, **more
    )
    assert isinstance(said, Person)


Mode = instructor.Mode
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
    ask(instructor.from_openai(openai.OpenAI(base_url=server + "/v1"), mode=mode), "Who is it?")
for mode in (Mode.JSON, Mode.MD_JSON):
    ask(instructor.from_openai(openai.OpenAI(base_url=server + "/v1"), mode=mode), "Tell me as JSON who it is")
anthropic_client = anthropic.Anthropic(base_url=server)
ask(instructor.from_anthropic(anthropic_client, mode=Mode.ANTHROPIC_TOOLS), "Who is it?", max_tokens=500)
ask(instructor.from_anthropic(anthropic_client, mode=Mode.ANTHROPIC_JSON), "Tell me as JSON who it is", max_tokens=500)
