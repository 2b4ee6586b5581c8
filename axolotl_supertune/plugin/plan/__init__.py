"""TODO-DOC plugin/plan."""
