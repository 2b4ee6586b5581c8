"""TODO-DOC plugin."""
