"""How the embedded vision model was made."""
