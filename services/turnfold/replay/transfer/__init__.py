"""Commands that move records: events as JSON lines, a log as one file."""
