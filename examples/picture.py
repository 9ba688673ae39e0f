"""Asks about a picture, twice. The second turn encodes nothing: the picture is known by its pixels."""

import base64
from io import BytesIO

from openai import OpenAI
from PIL import Image, ImageDraw

picture, file = Image.new("RGB", (96, 96), "white"), BytesIO()
ImageDraw.Draw(picture).ellipse((30, 30, 70, 70), fill="red")
picture.save(file, "PNG")
url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
first = [
    {"type": "image_url", "image_url": {"url": url}},
    {"type": "text", "text": "What is in the picture?"},
]
messages = []
for content in [first, "What color is the circle?"]:
    messages.append({"role": "user", "content": content})
    answer = client.chat.completions.create(
        model="satchel/shapes", messages=messages, extra_headers={"X-Agent-ID": "scout"}
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    print(answer.usage.prompt_tokens_details.cached_tokens, "tokens from memory:", messages[-1]["content"])
