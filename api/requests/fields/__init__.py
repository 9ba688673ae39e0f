"""Fields that the bodies of several protocols have."""
