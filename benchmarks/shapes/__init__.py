"""How the embedded vision model was made, and what it can do."""
