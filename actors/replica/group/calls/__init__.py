"""Calls that all processes of a group do: the leader tells them, the followers do them too."""
