"""Detects processes that make no progress, and ends them. Pure, but for the watchdog."""
