"""Plans a training: what a YAML would train, how much memory it takes, and what would be refused."""
