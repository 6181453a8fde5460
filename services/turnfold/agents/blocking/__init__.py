"""Says which line of an agent holds up all the others."""
