"""Several nodes on one machine, and models that are divided between them."""
