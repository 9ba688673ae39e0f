"""What actors say to each other: the methods of each (`clients`, `store_client`), the messages in them, and the ids
that all use. Pure, but for control_store, registry and reporter."""
