"""Takes dispatched groups from the log and runs an agent for each of their rollouts."""
