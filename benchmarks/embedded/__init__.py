"""How the embedded text model was made, and what it can do."""
