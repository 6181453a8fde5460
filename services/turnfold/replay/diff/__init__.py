"""Two sets of trajectories of the same rollouts: what changed, by rollout, turn and token.

`facts` is what is remembered of a trajectory, `comparison` holds two sets against each other,
`tokens` names the tokens of two trajectories that differ; all are pure. `app` reads files and topics.
"""
