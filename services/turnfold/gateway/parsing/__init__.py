"""Sampled text to reasoning, content and tool calls; one module for each family of models."""
