"""What a store does, one idea in each file: a turn, an agent's words, KV on the disk, copies, moves."""
