"""Turns batch manifests into policy versions with verl's own worker.

fetch → plan → advantages → update → publish → checkpoint: `app` runs that loop. `plan`,
`placement`, `advantages`, `rows`, `source`, `resume`, `memory` and `metrics` are pure; `tensors`
alone knows the names of verl's tensors; `backend` drives verl's worker on one rank, and `drivers`
reach all ranks: in this process, under torchrun, or in a Ray cluster.
"""
