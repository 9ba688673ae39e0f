"""How actors call each other: the methods of each (`clients`, `store_client`), their messages, and the ids that all
use. Pure, but for control_store, registry and reporter."""
