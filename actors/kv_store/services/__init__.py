"""The store's services, one in each file: turns, transcripts, KV on disk, copies, moves."""
