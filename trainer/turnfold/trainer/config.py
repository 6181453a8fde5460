"""verl's own hydra configuration, with defaults that run anywhere, and what it may not say.

Every knob is where verl has it; an override given by the user wins over ours. Composing needs the
yaml files of the verl package but does not import verl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import SettingsError
from turnfold.trainer.advantages import AdvantageError, check_estimator
from turnfold.trainer.plan import PlanError, Schedule, schedule

LOSS_AGG_MODE = "seq-mean-token-sum"

MEAN_OVER_ROWS = frozenset({"sapo", "geo_mean"})
"""Policy losses of verl that take a mean over rows whatever `loss_agg_mode` says."""

RATIO_OF_A_ROW = frozenset({"gspo"})
"""Policy losses whose ratio is that of a whole row."""


NOT_READ: Mapping[str, str] = {
    "trainer.total_training_steps": "--num-batches",
    "trainer.total_epochs": "--num-batches",
    "trainer.save_freq": "TURNFOLD_CHECKPOINT_EVERY",
    "trainer.max_actor_ckpt_to_keep": "TURNFOLD_KEEP_CHECKPOINTS",
    "trainer.default_local_dir": "--run-dir",
    "trainer.resume_mode": "a run goes on behind its last checkpoint in --run-dir, always",
    "trainer.test_freq": "TURNFOLD_EVAL_EVERY",
    "trainer.val_before_train": "TURNFOLD_EVAL_DATASET; version 0 is evaluated",
    "trainer.v1": "TURNFOLD_MAX_STALENESS",
    "algorithm.filter_groups": "TURNFOLD_IS_ZERO_VARIANCE_DROPPED",
    "data.train_files": "TURNFOLD_DATASET",
    "data.val_files": "TURNFOLD_EVAL_DATASET",
    "data.max_prompt_length": "TURNFOLD_MAX_CONTEXT_TOKENS and TURNFOLD_MAX_ROW_TOKENS",
    "data.max_response_length": "TURNFOLD_MAX_ROW_TOKENS",
    "actor_rollout_ref.rollout.agent": "workers run agents (`turnfold worker`)",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engines are servers of their own",
    "critic": "no estimator here needs one",
    "reward": "agents give rewards",
    "reward_model": "agents give rewards",
    "custom_reward_function": "agents give rewards",
}
"""verl's settings, and all below them, that have no effect here, and what stands in their place."""


def defaults(
    run: RunConfig, *, model: str, is_gpu: bool, num_batches: int | None, is_fsdp: bool = True
) -> list[str]:
    """Our overrides of verl's configuration, in hydra's own form.

    verl's other engines, such as Megatron (`model_engine=megatron`), have no settings of FSDP.
    """
    actor, rollout, model_ = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    fp32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    chosen = [
        f"{model_}.path={_quoted(model)}",
        # flash-attn is a package of its own; with it, override both of these.
        f"++{model_}.override_config.attn_implementation=sdpa",
        f"{model_}.use_remove_padding=false",
        f"{model_}.lora.merge=true",  # engines load full weights
        f"{model_}.enable_gradient_checkpointing={str(is_gpu).lower()}",
        f"{actor}.use_torch_compile=false",
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
    if is_fsdp:
        chosen += [f"{actor}.strategy=fsdp2", f"{actor}.fsdp_config.use_torch_compile=false"]
    if is_fsdp and not is_gpu:
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
    ours = defaults(
        run,
        model=model,
        is_gpu=is_gpu,
        num_batches=num_batches,
        is_fsdp=not any(_key(o) == "model_engine" and o != "model_engine=dp" for o in overrides),
    )
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
        actor.policy_loss.loss_mode in MEAN_OVER_ROWS,
        f"actor_rollout_ref.actor.policy_loss.loss_mode={actor.policy_loss.loss_mode}: verl takes "
        "its mean over the rows of a micro-batch, so that a rollout of more rows would count for "
        "more; use vanilla, gspo or cispo",
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
        not is_gpu and actor.strategy != "fsdp2",
        f"actor_rollout_ref.actor.strategy={actor.strategy}: on a CPU verl has FSDP2 alone; use "
        "fsdp2, or train on GPUs (TURNFOLD_DEVICE=cuda)",
    )
    _refuse(
        rollout.top_p != 1 or rollout.top_k > 0,
        f"actor_rollout_ref.rollout.top_p={rollout.top_p}, top_k={rollout.top_k}: the trainer's "
        "logprobs are over the whole vocabulary, so that those of truncated sampling do not "
        "compare; remove the overrides, and sample without truncation",
    )
    _check_checkpoint_engine(rollout.checkpoint_engine)
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


def cautions(config: Any, overrides: Sequence[str] = ()) -> list[str]:
    """What is allowed and does not mean what its name says: settings that nothing reads, and a ratio
    of a sequence where a rollout has several rows.
    """
    unread = [
        f"{key} is not read here; instead: {instead}"
        for key in map(_key, overrides)
        for name, instead in NOT_READ.items()
        if f"{key}.".startswith(f"{name}.")
    ]
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss_mode not in RATIO_OF_A_ROW:
        return unread
    return [
        *unread,
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} takes a row for a sequence: a "
        "rollout of several rows (tree history, sub-agents, resets) has a ratio for each of them; "
        "keep history_mode=linear, or use a loss with a ratio for each token (vanilla, cispo)",
    ]


def sends_weights(config: Any) -> bool:
    """Does one of verl's checkpoint engines send weights, besides the directory of a version?"""
    return bool(config.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive")


def check_gate(config: Any, max_mismatch_kl: float | None) -> None:
    """Raise SettingsError for a limit on a mismatch that nobody would measure."""
    _refuse(
        max_mismatch_kl is not None and bool(config.algorithm.rollout_correction.bypass_mode),
        "TURNFOLD_MAX_MISMATCH_KL is set, but with algorithm.rollout_correction.bypass_mode=true "
        "the trainer computes no logprobs to compare with: take one of them away",
    )


def _check_checkpoint_engine(engine: Any) -> None:
    name = "actor_rollout_ref.rollout.checkpoint_engine"
    _refuse(
        engine.backend != "naive" and not engine.custom_backend_module,
        f"{name}.backend={engine.backend}: verl's own backends send to rollout workers that verl "
        "starts beside an engine in its Ray cluster, and here engines are servers that somebody "
        f"else starts, which load a directory; keep naive, or name in {name}."
        "custom_backend_module a module that registers a backend with a receiving side of its own",
    )


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
