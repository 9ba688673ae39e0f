"""The backend over Ray: the router asked, replicas' frames read, the stores called."""
