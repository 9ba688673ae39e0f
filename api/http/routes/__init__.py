"""The handlers of requests, by protocol. Each class adds its own routes to the application."""
