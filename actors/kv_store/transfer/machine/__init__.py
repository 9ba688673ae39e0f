"""A pull of blocks without its sockets: messages, handshake, scheduling of fetches, retries. Pure."""
