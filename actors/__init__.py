"""What runs: the router, the replicas and the stores, and the messages between them."""

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.actors; its folder's bare name belongs to somebody else")

from . import patches

# Before any module below imports mlx-lm.
patches.keep_open_files()
