"""One job after the other, in steps between which requests come and go: what models that make images and models of
speech share."""
