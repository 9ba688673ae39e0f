"""Decides which sequences are admitted, prefilled, decoded and preempted in a step, fairly among tenants. Pure."""
