"""Several models behind one server, models that come and go, and models of audio."""
