"""TODO-DOC commands."""
