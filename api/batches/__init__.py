"""Files of many requests, and the batches that answer them when nothing else runs."""
