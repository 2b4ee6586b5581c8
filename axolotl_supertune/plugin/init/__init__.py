"""Writes a commented YAML for a base model and a file of training records: `axolotl supertune init`."""
