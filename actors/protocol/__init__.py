"""What processes say to each other, and the ids that all use. Pure, but for handles, registry and reporter."""
