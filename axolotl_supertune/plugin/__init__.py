"""The Axolotl plugin: from a YAML to a trained and verified adapter."""
