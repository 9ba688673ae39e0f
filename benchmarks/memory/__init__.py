"""What memory takes, costs in quality and saves."""
