"""Messages between processes, and the ids that all of them use. Pure, but for calls, handles, control_store, registry
and reporter."""
