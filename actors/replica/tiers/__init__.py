"""Storage of a replica's KV and image embeddings outside the batch: memory and disk."""
