"""The policy relay: new weights from the log into every engine."""
