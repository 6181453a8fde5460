"""The HTTP of the gateway."""
