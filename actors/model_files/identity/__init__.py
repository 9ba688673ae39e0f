"""What identifies a model: digests of its files, and ids of the whole, of some of its layers, and with an adapter."""
