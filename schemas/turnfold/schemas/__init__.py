"""The messages that travel over the log, and nothing else: every other package imports from here.

A message holds data; whoever needs a decision made about it calls a function of another package.
"""
