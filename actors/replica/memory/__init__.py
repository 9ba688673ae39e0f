"""What a replica keeps outside the batch, and how much: the budget, KV and image embeddings in memory, the disk."""
