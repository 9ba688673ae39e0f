import os
from collections.abc import Iterable
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


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["London"]


def ask_both(client: instructor.Instructor, **more: int) -> None:
    messages = [{"role": "user", "content": "Who are they?"}]
    said = client.chat.completions.create(
        model="satchel/script", response_model=Iterable[Person | City], messages=messages, max_retries=1, **more
    )
    assert [type(each) for each in said] == [Person, City]


def ask(client: instructor.Instructor, prompt: str, **more: int) -> None:
    messages = [{"role": "user", "content": prompt}]
    said = client.chat.completions.create(
        model="satchel/script", response_model=Person, messages=messages, max_retries=1, **more
    )
    assert isinstance(said, Person)


Mode = instructor.Mode
for mode in (
    *(Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA),
    *(Mode.FUNCTIONS, Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS),
):
    ask(instructor.from_openai(openai.OpenAI(base_url=server + "/v1"), mode=mode), "Who is it?")
for mode in (Mode.JSON, Mode.JSON_O1, Mode.MD_JSON):
    ask(instructor.from_openai(openai.OpenAI(base_url=server + "/v1"), mode=mode), "Tell me as JSON who it is")
ask_both(instructor.from_openai(openai.OpenAI(base_url=server + "/v1"), mode=Mode.PARALLEL_TOOLS))
anthropic_client = anthropic.Anthropic(base_url=server)
ask(instructor.from_anthropic(anthropic_client, mode=Mode.ANTHROPIC_TOOLS), "Who is it?", max_tokens=500)
ask(instructor.from_anthropic(anthropic_client, mode=Mode.ANTHROPIC_JSON), "Tell me as JSON who it is", max_tokens=500)
for mode in (Mode.ANTHROPIC_REASONING_TOOLS,):
    ask(instructor.from_anthropic(anthropic_client, mode=mode), "Who is it?", max_tokens=500)
ask_both(instructor.from_anthropic(anthropic_client, mode=Mode.ANTHROPIC_PARALLEL_TOOLS), max_tokens=500)
