"""Tool calls that models write in other formats than their template's: found, repaired and checked. Computation
only."""
