"""What the embedded models can do."""
