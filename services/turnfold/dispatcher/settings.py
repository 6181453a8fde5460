"""What a dispatcher is told, besides the RunConfig."""

from __future__ import annotations

from turnfold.dispatcher.plan import Limits
from turnfold.dispatcher.rounds import RoundPlan
from turnfold.log.settings import ServiceSettings
from turnfold.schemas.events import HistoryMode, NonlinearPolicy, RewritePolicy, Sampling


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of `turnfold dispatcher`."""

    dataset: str
    """Tasks: a .jsonl, .parquet or .arrow file, or a Hugging Face data set directory."""
    dataset_split: str = "train"
    """Split to take from a data set directory that has several."""
    seed: int = 0
    """Of the order in which tasks are dispatched."""
    is_shuffled: bool = True
    """Whether each epoch has its own order; otherwise that of the data set."""
    epochs: int | None = None
    """Passes over the data set, after which the dispatcher ends; for ever when unset."""
    num_batches: int | None = None
    """Batches of the run: no group is dispatched beyond them, and then it ends."""
    max_groups_in_flight: int | None = None
    """Upper limit of groups in flight, whatever the staleness bound would allow."""
    lookahead: int = 1
    """Batches beyond the next one that groups are dispatched for; -1 as many as the bound allows.

    Seats beyond are kept for slow groups, so that only these are as old as max_staleness.
    """
    history_mode: HistoryMode = "linear"
    """linear heals a client's history back to the sampled tokens, tree takes it as it renders."""
    nonlinear: NonlinearPolicy = "reset"
    """What linear mode does with a history that has no stored prefix."""
    rewrites: RewritePolicy = "keep"
    """What linear mode does where the template takes earlier text back: keep the saved tokens, or
    follow the template in a new segment."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts."""
    max_tokens: int = 4096
    """Upper limit of sampled tokens a turn."""
    max_turns: int | None = None
    """Upper limit of model calls a rollout."""
    max_context_tokens: int | None = None
    """Upper limit of prompt plus output; the engine's own when unset."""
    eval_dataset: str | None = None
    """Tasks to evaluate on, in any form that `dataset` takes; no evaluation when unset."""
    eval_dataset_split: str = "test"
    """Split to take from an evaluation data set directory that has several."""
    eval_every: int = 10
    """Policy versions between two evaluations; version 0 and the last one are evaluated too."""
    eval_num_tasks: int | None = None
    """Evaluate on the first so many rows only."""
    eval_group_size: int = 1
    """Rollouts of each evaluation task; more give pass@k for larger k."""
    eval_temperature: float | None = None
    """Sampling temperature of evaluation rollouts; that of training when unset."""
    eval_pass_reward: float = 1.0
    """A rollout with this reward or more has passed, for pass@k."""
    eval_groups_in_flight: int = 8
    """Evaluation groups in flight, so that they take few of the workers' slots."""

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "num_batches",
            "max_groups_in_flight",
            "eval_every",
            "eval_num_tasks",
            "eval_group_size",
            "eval_groups_in_flight",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @property
    def limits(self) -> Limits:
        return Limits(
            num_batches=self.num_batches,
            epochs=self.epochs,
            max_in_flight=self.max_groups_in_flight,
            lookahead=None if self.lookahead < 0 else self.lookahead,
        )

    def round_plan(self, num_rows: int) -> RoundPlan:
        """What to evaluate, of a data set with so many rows."""
        return RoundPlan(
            every=self.eval_every,
            num_tasks=min(num_rows, self.eval_num_tasks or num_rows),
            pass_reward=self.eval_pass_reward,
            max_in_flight=self.eval_groups_in_flight,
        )

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens)

    @property
    def eval_sampling(self) -> Sampling:
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        return Sampling(temperature=temperature, max_tokens=self.max_tokens)
