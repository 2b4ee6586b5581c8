"""TODO-DOC method."""
