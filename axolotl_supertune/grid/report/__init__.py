"""Turns the records of a grid into tables, figures and a page: `axolotl supertune report`."""
