"""A model's folder before any of it is loaded: where it lives, whether it is whole, what in it may run."""
