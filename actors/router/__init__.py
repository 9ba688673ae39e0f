"""Where a request goes. Pure, but for the actor."""
