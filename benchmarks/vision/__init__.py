"""Pictures and videos: what caching image embeddings and KV saves and costs, compared with other servers."""
