import os
from typing import Literal

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["SERVER"] + "/v1")


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


@function_tool
def read_file(path: str) -> str:
    """Reads a file."""
    return f"the heron sleeps at {path}"


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    model = kind("satchel/script", openai_client=client)
    agent = Agent("reader", instructions="You read files.", model=model, tools=[read_file])
    done = Runner.run_sync(agent, "Please read the file /note.txt")
    assert done.final_output == "It says: the heron sleeps at /note.txt", done.final_output
    agent = Agent("teller", model=model, output_type=Person)
    assert isinstance(Runner.run_sync(agent, "Who is it?").final_output, Person)
