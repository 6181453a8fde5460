"""Which work leaves the event loop."""
