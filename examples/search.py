"""Embeds texts and ranks documents, through the same endpoint and with Python handles."""

from openai import OpenAI

from satchel.api import connect

texts = ["The code of ada is 1815.", "one, two"]
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
answer = client.embeddings.create(model="satchel/recall", input=texts)
print(len(answer.data), len(answer.data[0].embedding), answer.usage.total_tokens)

with connect() as cluster:
    vectors = cluster.embed_sync(texts)  # a NumPy array, float32
    best = cluster.rerank_sync("What is the code of ada?", texts, top_n=1)
    print(vectors.shape, texts[best[0].index])
