import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


def read_file(path: str) -> str:
    """Reads a file."""
    return f"the heron sleeps at {path}"


server = os.environ["SERVER"]
openai = OpenAIProvider(base_url=server + "/v1", api_key="none")
for model in (
    OpenAIChatModel("satchel/script", provider=openai),
    OpenAIResponsesModel("satchel/script", provider=openai),
):
    done = Agent(model, tools=[read_file]).run_sync("Please read the file /note.txt")
    assert done.output == "It says: the heron sleeps at /note.txt", done.output
    assert isinstance(Agent(model, output_type=Person).run_sync("Who is it?").output, Person), model
    assert isinstance(Agent(model, output_type=NativeOutput(Person)).run_sync("Who is it?").output, Person)
