"""Where a replica's KV goes from the batch and comes back from: memory, the disk, and pictures' features."""
