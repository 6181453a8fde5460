"""One rollout, from its start to an end that the log knows."""
