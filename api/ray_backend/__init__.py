"""The backend over Ray: calls to the router, the replicas and the stores."""
