"""The topics as they should be, and what retention would take away."""
