"""Whether processes make progress, and what becomes of those that do not. Pure, but for the watchdog."""
