"""Who may use the endpoint, and how much of it."""

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.api.access; its folder's bare name belongs to somebody else")
