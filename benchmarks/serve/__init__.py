"""Serving over HTTP, beside other servers and bare engines."""
