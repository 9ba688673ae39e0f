"""How a cluster authenticates machines and its endpoint: invitations, certificates, and the door on the head."""
