"""verl's own hydra configuration, with defaults that run anywhere, and what it may not say.

Every knob is where verl has it; an override given by the user wins over ours. Composing needs the
yaml files of the verl package but does not import verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import SettingsError
from turnfold.trainer.advantages import AdvantageError, check_estimator
from turnfold.trainer.plan import PlanError, Schedule, schedule

LOSS_AGG_MODE = "seq-mean-token-sum"


def defaults(run: RunConfig, *, model: str, is_gpu: bool, num_batches: int | None) -> list[str]:
    """Our overrides of verl's configuration, in hydra's own form."""
    actor, rollout, model_ = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    fp32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    chosen = [
        f"{model_}.path={_quoted(model)}",
        # flash-attn is a package of its own; with it, override both of these.
        f"++{model_}.override_config.attn_implementation=sdpa",
        f"{model_}.use_remove_padding=false",
        f"{model_}.lora.merge=true",  # engines load full weights
        f"{model_}.enable_gradient_checkpointing={str(is_gpu).lower()}",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=false",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={run.max_row_tokens}",
        f"{actor}.ppo_mini_batch_size={run.groups_per_batch}",
        f"{actor}.loss_agg_mode={LOSS_AGG_MODE}",
        f"{actor}.optim.total_training_steps={num_batches or -1}",
        f"{rollout}.name=vllm",  # a mandatory key; the trainer starts no engine
        f"{rollout}.n={run.group_size}",
        f"{rollout}.log_prob_use_dynamic_bsz=true",
        f"{rollout}.log_prob_max_token_len_per_gpu={run.max_row_tokens}",
        f"data.train_batch_size={run.groups_per_batch}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.logger=[file]",
        "trainer.project_name=turnfold",
        f"trainer.experiment_name={_quoted(run.run_id)}",
        "trainer.n_gpus_per_node=1",
    ]
    if not is_gpu:
        ref = "actor_rollout_ref.ref"
        chosen += [f"++{part}.fsdp_config.mixed_precision={fp32}" for part in (actor, ref)]
    return chosen


def compose(
    overrides: Sequence[str],
    run: RunConfig,
    *,
    model: str = "",
    is_gpu: bool = False,
    num_batches: int | None = None,
) -> Any:
    """verl's `ppo_trainer` configuration as an OmegaConf DictConfig.

    Raises SettingsError when verl is not installed or an override does not fit it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise SettingsError('verl is not installed: pip install "turnfold[train]"')
    ours = defaults(run, model=model, is_gpu=is_gpu, num_batches=num_batches)
    chosen = {_key(override) for override in overrides}
    kept = [override for override in ours if _key(override) not in chosen]
    directory = str(Path(spec.origin).parent / "trainer" / "config")
    try:
        with initialize_config_dir(config_dir=directory, version_base=None):
            return hydra_compose("ppo_trainer", overrides=[*kept, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise SettingsError(f"verl's configuration: {error}") from error


def check(config: Any, run: RunConfig, *, num_ranks: int = 1, is_gpu: bool = False) -> Schedule:
    """The schedule of a configuration that this trainer can keep to.

    Raises SettingsError naming the setting, what is wrong with it and what to do.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    _same("data.train_batch_size", config.data.train_batch_size, run.groups_per_batch)
    _same("actor_rollout_ref.rollout.n", rollout.n, run.group_size)
    _refuse(
        actor.loss_agg_mode != LOSS_AGG_MODE,
        f"actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}: only {LOSS_AGG_MODE} adds "
        "up over rows, so that splitting a rollout into rows changes nothing; remove the override",
    )
    _refuse(
        not actor.use_dynamic_bsz or not rollout.log_prob_use_dynamic_bsz,
        "use_dynamic_bsz=false: the number of rows varies, and fixed micro-batches must divide it; "
        "keep actor_rollout_ref.actor.use_dynamic_bsz=true and "
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    )
    _refuse(
        bool(actor.shuffle),
        "actor_rollout_ref.actor.shuffle=true: verl would move rows between mini-batches and tear "
        "groups apart; keep it false",
    )
    _refuse(
        bool(config.algorithm.use_kl_in_reward),
        "algorithm.use_kl_in_reward=true: a rollout has one reward here, not one for each token; "
        "use actor_rollout_ref.actor.use_kl_loss=true",
    )
    _refuse(
        lora_rank(config) > 0 and not config.actor_rollout_ref.model.lora.merge,
        "actor_rollout_ref.model.lora.merge=false: engines load full weights, so that adapters "
        "have to be merged; remove the override",
    )
    _refuse(
        not is_gpu and actor.strategy == "fsdp",
        "actor_rollout_ref.actor.strategy=fsdp: FSDP1 does not run on a CPU; use fsdp2",
    )
    budget = min(actor.ppo_max_token_len_per_gpu, rollout.log_prob_max_token_len_per_gpu)
    _refuse(
        budget < run.max_row_tokens,
        f"a micro-batch holds {budget} tokens but a row may have {run.max_row_tokens}: raise "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu and actor_rollout_ref.rollout."
        "log_prob_max_token_len_per_gpu, or lower TURNFOLD_MAX_ROW_TOKENS",
    )
    try:
        check_estimator(config.algorithm.adv_estimator)
        return schedule(
            groups_per_batch=run.groups_per_batch,
            groups_per_mini_batch=actor.ppo_mini_batch_size,
            group_size=run.group_size,
            num_epochs=actor.ppo_epochs,
            num_ranks=num_ranks,
            max_row_tokens=budget,
        )
    except (AdvantageError, PlanError) as error:
        raise SettingsError(str(error)) from error


def lora_rank(config: Any) -> int:
    """Rank of the adapter, wherever verl's engines read it; 0 without one."""
    model = config.actor_rollout_ref.model
    return int(model.lora_rank or model.lora.rank)


def _same(name: str, actual: int, expected: int) -> None:
    _refuse(
        actual != expected,
        f"{name}={actual} but batches are cut for {expected}: remove the override, or change the "
        "run's TURNFOLD_GROUPS_PER_BATCH and TURNFOLD_GROUP_SIZE for all services",
    )


def _refuse(is_wrong: bool, text: str) -> None:
    if is_wrong:
        raise SettingsError(text)


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
