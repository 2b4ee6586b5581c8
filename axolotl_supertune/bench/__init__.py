"""`axolotl supertune bench`: time and memory of one training step, per method, each in a process of its own."""
