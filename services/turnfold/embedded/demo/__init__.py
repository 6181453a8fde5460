"""The whole pipeline on one machine, every service as its own process."""
