"""A whole pipeline that is disturbed on purpose, and what must hold all the same.

Broker, gateway, healer, assembler, dispatcher and worker are the real processes. Two are stand-ins:
`engine` answers as a function of its prompt, so that every rollout of a task must come to the same
tokens, and `trainer` does all that the trainer does but for the arithmetic, so that no model is
needed. `agent` is what the worker runs, `site` says which processes there are.

`faults` says what is done to whom and when, `findings` what must hold afterwards, `report` how it is
told; these are pure. `strikes` does the faults, by signals and limits, through the connections of
`network` and the clocks of `clock`. `evidence` reads what was left behind. `app` runs it all.
"""
