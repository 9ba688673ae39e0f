"""How the embedded text model was made."""
