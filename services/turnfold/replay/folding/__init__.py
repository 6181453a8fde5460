"""Folds a whole log into trajectories, in this process or with one process for each part of it."""
