"""One model on one machine, with its scheduler and its KV memory."""

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.actors.replica; its folder's bare name belongs to somebody else")
