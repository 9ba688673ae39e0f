"""Messages between processes, and the ids that all of them use. Pure, but for handles, registry and reporter."""
