"""Trajectories in, batch manifests out.

`groups` folds tasks, trajectories and decisions into groups; `cut` takes the next decision, a pure
function of that state; `app` reads and writes the log.
"""
