"""A whole pipeline that is disturbed on purpose, and what must hold all the same.

Broker, gateway, healer, assembler, dispatcher and worker are the real processes. Two are stand-ins:
`engine` answers as a function of its prompt, so that every rollout of a task must come to the same
tokens, and `trainer` does all that the trainer does but for the arithmetic, so that no model is
needed. `agent` is what the worker runs. `faults` says what is done to whom and when, `findings` what
must hold afterwards; both are pure. `app` runs it.
"""
