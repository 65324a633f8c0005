"""Files, servers and what stands around a session."""
