"""How real checkpoints are served."""
