"""What the cluster is: its config, its processes on this machine, how it is found and checked."""

if not __name__.startswith("satchel."):
    raise ImportError("import this package as satchel.cluster; its folder's bare name belongs to somebody else")
