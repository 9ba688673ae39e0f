"""Which layers of a model a process has: the model opened with lazy weights, what each layer needs, and stages."""
