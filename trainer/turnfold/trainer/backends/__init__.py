"""What the trainer touches on the machine: the process environment and files that must be whole."""
