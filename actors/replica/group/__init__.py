"""A replica that is divided among several processes, on several nodes: how its parts are loaded, formed and served."""
