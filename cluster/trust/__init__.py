"""How a cluster authenticates machines and its endpoint: invitations, certificates, and the join server on the head."""
