"""One model on one machine, with its scheduler and its KV memory."""
