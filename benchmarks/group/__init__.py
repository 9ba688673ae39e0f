"""A model divided among processes, compared with the whole model in one."""
