"""Loads and unloads the models that come and go. Pure, but for the actor and `needs`."""
