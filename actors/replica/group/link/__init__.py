"""What the processes of a group are connected by, and how they notice that one is lost."""
