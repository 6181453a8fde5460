"""Reads a log for its account, and for the way of one turn into the policy."""
