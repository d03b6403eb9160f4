"""From a model and a little text to an artifact."""
