"""A server that is attacked in every way known here while 16 clients stream."""
