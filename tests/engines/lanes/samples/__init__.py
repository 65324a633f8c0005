"""The campaign on torch's own samples of arguments for its operators."""
