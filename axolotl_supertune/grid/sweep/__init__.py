"""Trains, chooses and scores the runs of a grid: `axolotl supertune sweep`."""
