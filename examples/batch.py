"""A batch of requests, answered while nothing else is computed; it would go on after a crash of the server."""

import json
import time

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
lines = [
    {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": f"The code of {name} is {code}. What is the code of {name}?"}]
        },
    }
    for name, code in (("ada", 1815), ("byron", 1788))
]
asked = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("asked.jsonl", asked), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
for answer in sorted(answers, key=lambda answer: answer["custom_id"]):
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
