"""Agents that are a command: any program, in any language, on this machine or in a container."""
