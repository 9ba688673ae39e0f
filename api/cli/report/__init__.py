"""A report of this machine in one file: `satchel doctor --report`."""
