"""The healer: the events of a rollout in, its trajectory out.

`fold` adds one event to the state of one rollout, `lineage` finds every turn's full tokens and the
turn it continues, `rows` turns a closed rollout into training rows and a ledger, `partition` does so
for a whole partition of the log, and `deadlines` says who is overdue. All of these are pure. `app`
reads Kafka, writes trajectories exactly once, and turns a passed deadline into an event.
"""
