"""Grids of runs: `sweep` trains, chooses and scores them, `report` shows what they gave."""
