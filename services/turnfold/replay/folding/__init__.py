"""Folds a log, or some partitions of it, into trajectories."""
