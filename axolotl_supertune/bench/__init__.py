"""Benchmark of one training step: time and memory of Super, Supra and other methods, each in its own process."""
