"""The protocols of the endpoint, a folder each: bodies in; answers, events and errors out; and the routes."""
