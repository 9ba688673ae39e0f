"""The HTTP application and its server."""
