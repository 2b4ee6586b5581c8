"""TODO-DOC engines."""
