"""Fields that the bodies of several protocols have, under whatever name. Computation only."""
