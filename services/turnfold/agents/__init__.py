"""What the author of an agent imports, and the worker that runs agents.

    from turnfold.agents import EnvironmentFailed, Result

    async def run(task, rollout):
        client = AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key)
        ...
        return 1.0                                  # the reward
        return Result(reward=0.5, is_truncated=True)

An agent that is started by something else than `turnfold worker` opens its rollouts itself, with
`GatewayClient`.
"""

from turnfold.agents.client import GatewayClient, GatewayError, Rollout, RolloutClosed, Session
from turnfold.agents.results import EnvironmentFailed, InvalidResult, Result

__all__ = [
    "EnvironmentFailed",
    "GatewayClient",
    "GatewayError",
    "InvalidResult",
    "Result",
    "Rollout",
    "RolloutClosed",
    "Session",
]
