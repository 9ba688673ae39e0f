"""The config tree and what its values mean: nodes, stages, times, units, media. Read once, and passed down."""
