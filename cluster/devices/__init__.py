"""This machine's devices: the CUDA cards and which node has which, the memory that is free, the energy they take."""
