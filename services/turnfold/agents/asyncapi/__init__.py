"""The topics as an AsyncAPI document."""
