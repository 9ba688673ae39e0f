"""A model's folder before it is loaded: where it is, whether it is complete, and which of its code may run."""
