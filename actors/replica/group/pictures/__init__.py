"""What the processes of a group have of a vision model: the encoder, and messages about pictures."""
