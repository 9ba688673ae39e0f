"""Agents on a server that is killed and whose disk fills: nothing kept is lost, nothing forgotten found."""
