"""The deadlines of one rollout, each inside the next. Pure.

    0            setup_s                 run_s         kill_s        end_s
    |-- set-up --|--------- run ---------|--- grace ---|--- goodbye ---|

The set-up may take until `setup_s`. At `run_s` the agent is told to stop; it may still score what
it has. At `kill_s` it is killed, or left behind when it cannot be. What is left until `end_s`, when
the healer would give the rollout up, is for telling the gateway why.
"""

from __future__ import annotations

import msgspec

_GOODBYE_S = 5.0
_LONGEST_GRACE = 0.2
_LONGEST_GOODBYE = 0.05
"""Shares of a short rollout's time."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after the rollout's start."""

    setup_s: float
    run_s: float
    kill_s: float
    end_s: float

    @property
    def grace_s(self) -> float:
        """Between being told to stop and being killed."""
        return self.kill_s - self.run_s


def deadlines(timeout_s: float, grace_s: float, setup_timeout_s: float | None = None) -> Deadlines:
    """Deadlines that all lie before `timeout_s`, whatever the settings.

    >>> deadlines(1800.0, grace_s=10.0, setup_timeout_s=300.0)
    Deadlines(setup_s=300.0, run_s=1785.0, kill_s=1795.0, end_s=1800.0)
    >>> deadlines(10.0, grace_s=10.0, setup_timeout_s=300.0)
    Deadlines(setup_s=7.5, run_s=7.5, kill_s=9.5, end_s=10.0)
    """
    kill_s = timeout_s - min(_GOODBYE_S, timeout_s * _LONGEST_GOODBYE)
    run_s = kill_s - min(grace_s, timeout_s * _LONGEST_GRACE)
    setup_s = run_s if setup_timeout_s is None else min(setup_timeout_s, run_s)
    return Deadlines(setup_s=setup_s, run_s=run_s, kill_s=kill_s, end_s=timeout_s)
