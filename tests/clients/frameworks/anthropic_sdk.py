import os
from typing import Literal

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=os.environ["SERVER"])
ASKED = {"role": "user", "content": "Please read the file /note.txt"}


class Person(BaseModel):
    name: Literal["Ada", "Grace"]
    age: Literal[36, 85]


@beta_tool
def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: of the file.
    """
    return f"the heron sleeps at {path}"


asked = {"model": "satchel/script", "max_tokens": 500}
last = client.beta.messages.tool_runner(**asked, tools=[read_file], messages=[ASKED]).until_done()
assert last.content[-1].text == "It says: the heron sleeps at /note.txt"
with client.messages.stream(**asked, messages=[{"role": "user", "content": "Say 'good day'"}]) as stream:
    assert "".join(stream.text_stream) == "good day"
parsed = client.messages.parse(**asked, messages=[{"role": "user", "content": "Who is it?"}], output_format=Person)
assert isinstance(parsed.parsed_output, Person)
