"""Commands that watch a running server: what runs, how fast, and its logs."""
