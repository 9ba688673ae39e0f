"""Commands on models: those on this machine, those of the Hub, and those of the running server."""
