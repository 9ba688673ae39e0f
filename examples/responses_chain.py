"""OpenAI's Responses API: the second response continues the first by its id."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
first = client.responses.create(model="satchel/recall", input="Remember: the code of ada is 1815.")
second = client.responses.create(
    model="satchel/recall", input="What is the code of ada?", previous_response_id=first.id
)
print(second.output_text)
