"""Agent programs that people run, unmodified, against a real server with the scripted model."""
