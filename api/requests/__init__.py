"""A request in the form that all protocols share: its caller, its agent, messages, options."""
