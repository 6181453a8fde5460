"""Work on the partitions of a topic, divided among processes."""
