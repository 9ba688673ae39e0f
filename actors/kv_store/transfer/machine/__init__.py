"""A pull of blocks without its sockets: what is said, proved, asked for next, and given up. Pure."""
