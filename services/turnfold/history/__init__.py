"""The fold of a session's turns: exact token sequences, canonical lookup, healing of drift.

Pure: no clock, no network, no files. The gateway plans prompts with it, the healer rebuilds rows.
"""
