"""Which replica a request goes to, and why."""

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.actors.router; its folder's bare name belongs to somebody else")
