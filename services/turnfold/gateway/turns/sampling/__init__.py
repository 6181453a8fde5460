"""From a request to its sample: read while it comes, resumed when the engine ends it early."""
