"""TODO-DOC tasks/contamination."""
