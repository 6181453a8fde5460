"""What one process does of a replay: some partitions of the events and of the trajectories."""
