"""The campaign on networks of other projects' kinds, from `pipeline init` to a session."""
