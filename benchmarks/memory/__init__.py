"""Memory, and what starting costs."""
