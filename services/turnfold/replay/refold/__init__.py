"""Other trajectories from the same log: another history mode, another reward.

`rewards` puts a reward on a trajectory and is pure, `client` loads the function and writes to a
topic, `app` does it for a whole log.
"""
