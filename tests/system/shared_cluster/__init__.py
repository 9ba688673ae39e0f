"""A real endpoint in the Ray cluster that all tests of these files share."""
