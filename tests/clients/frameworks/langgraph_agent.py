import os
from typing import Literal

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


def read_file(path: str) -> str:
    """Reads a file."""
    return f"the heron sleeps at {path}"


for responses in (False, True):
    model = ChatOpenAI(model="satchel/script", base_url=os.environ["SERVER"] + "/v1", use_responses_api=responses)
    agent = create_react_agent(model, [read_file], response_format=Person)
    state = agent.invoke({"messages": [("user", "Please read the file /note.txt")]})
    assert state["messages"][-1].text == "It says: the heron sleeps at /note.txt", state
    assert isinstance(state["structured_response"], Person)
    for method in ("function_calling", "json_schema"):
        assert isinstance(model.with_structured_output(Person, method=method).invoke("Who is it?"), Person)
