"""Replay: what the log says, computed again.

`rebuild` folds events into trajectories with the healer's own code, `decisions` takes every
decision of the assembler again, `compare` holds both against what the services wrote, `ledger`
accounts for every sampled token, `writers` writes trajectories for other tools, and `logfile` is a
slice of the log in one file. `client` reads Kafka or such a file; `app` puts it together.
"""
