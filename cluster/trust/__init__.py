"""Whom a cluster believes: invitations, certificates, and the door on the head."""
