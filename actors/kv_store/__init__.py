"""Blocks of KV: what they are called and where they are."""

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.actors.kv_store; its folder's bare name belongs to somebody else")
