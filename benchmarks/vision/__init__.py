"""Pictures and videos: what keeping features and KV saves and takes, beside other servers."""
