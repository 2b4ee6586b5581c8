"""Grids of runs: training them, and reporting what they gave."""
