import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: of the file.
    """
    return f"the heron sleeps at {path}"


model = OpenAIServerModel("satchel/script", api_base=os.environ["SERVER"] + "/v1", api_key="none")
agent = ToolCallingAgent([read_file], model, max_steps=3)
answer = agent.run("Please read the file /note.txt")
assert "the heron sleeps at /note.txt" in str(answer), answer
