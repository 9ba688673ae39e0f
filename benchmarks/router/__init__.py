"""The router's decisions at scale, and its rule beside others and other projects' routers."""
