"""Agents on several nodes: where they live, who has copies, who takes over."""
