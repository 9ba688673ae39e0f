"""Python handles: agents and actors of a running cluster, from scripts, notebooks and Ray tasks."""
