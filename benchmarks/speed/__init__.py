"""How fast a call is."""
