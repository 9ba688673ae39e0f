"""A request as all protocols understand it: who asks, whose memory it continues, messages, options."""
