from __future__ import annotations

import pytest

from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import SettingsError
from turnfold.trainer import config
from turnfold.trainer.plan import Schedule
from turnfold.trainer.preview import preview

RUN = RunConfig(run_id="it's a run", group_size=4, groups_per_batch=8, max_row_tokens=1000)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def checked(*overrides: str, is_gpu: bool = False) -> Schedule:
    return config.check(config.compose(overrides, RUN, is_gpu=is_gpu), RUN, is_gpu=is_gpu)


def test_sizes_come_from_the_run_unless_verls_own_settings_say_more() -> None:
    assert checked() == Schedule(
        num_mini_batches=1, rollouts_per_mini_batch=32, max_row_tokens=1000
    )
    found = checked(f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=3")
    assert (found.num_mini_batches, found.num_steps) == (4, 12)
    assert found.rollouts_per_mini_batch == 8


def test_defaults_are_those_that_run_anywhere_and_overrides_win() -> None:
    model = "/models/it's mine=yes"
    composed = config.compose([], RUN, model=model)
    assert composed.actor_rollout_ref.model.path == model
    assert composed.trainer.experiment_name == "it's a run"
    assert composed.algorithm.adv_estimator == "grpo"
    assert composed.algorithm.rollout_correction.rollout_is == "token"
    assert composed.actor_rollout_ref.actor.strategy == "fsdp2"
    attention = "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"
    for prefix in ("", "+", "++"):
        if prefix:
            composed = config.compose([prefix + attention], RUN)
            found = composed.actor_rollout_ref.model.override_config.attn_implementation
            assert found == "flash_attention_2"
    assert config.compose(["algorithm.adv_estimator=rloo"], RUN).algorithm.adv_estimator == "rloo"


@pytest.mark.field_case("SkyRL#872")
def test_the_learning_rate_schedule_counts_what_verl_steps_it_by_which_is_batches() -> None:
    composed = config.compose([], RUN, num_batches=40)
    assert composed.actor_rollout_ref.actor.optim.total_training_steps == 40


def test_a_gpu_keeps_verls_mixed_precision() -> None:
    on_cpu = config.compose([], RUN).actor_rollout_ref.actor.fsdp_config
    on_gpu = config.compose([], RUN, is_gpu=True).actor_rollout_ref.actor.fsdp_config
    assert on_cpu.mixed_precision.param_dtype == "fp32"
    assert "mixed_precision" not in on_gpu


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"{ACTOR}.loss_agg_mode=token-mean", "only seq-mean-token-sum adds up over rows"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "only seq-mean-token-sum adds up over rows"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "remove the override"),
        (f"{ACTOR}.use_dynamic_bsz=false", "fixed micro-batches must divide it; keep"),
        (f"{ACTOR}.ppo_mini_batch_size=3", "set .*ppo_mini_batch_size to one of 1, 2, 4, 8"),
        (f"{ACTOR}.ppo_mini_batch_size=256", "do not divide into mini-batches of 256"),
        (f"{ACTOR}.shuffle=true", "tear groups apart; keep it false"),
        ("algorithm.use_kl_in_reward=true", "use .*actor.use_kl_loss=true"),
        (f"{ACTOR}.strategy=fsdp", "on a CPU verl has FSDP2 alone; use fsdp2"),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=999", "holds 999 tokens but a row may have 1000"),
        ("data.train_batch_size=16", "data.train_batch_size=16 but batches are cut for 8"),
        (f"{ROLLOUT}.n=5", "rollout.n=5 but batches are cut for 4"),
        ("algorithm.adv_estimator=gae", "it needs a critic"),
        (f"{ACTOR}.policy_loss.loss_mode=sapo", "its mean over the rows of a micro-batch"),
        (f"{ACTOR}.policy_loss.loss_mode=geo_mean", "use vanilla, gspo or cispo"),
        (f"{ROLLOUT}.checkpoint_engine.backend=nccl", "which load a directory; keep naive, or"),
        (f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded", "a receiving side of its own"),
    ],
)
def test_what_would_break_the_schedule_is_refused_with_its_remedy(
    override: str, reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        checked(override)


def test_megatron_is_composed_without_the_settings_of_fsdp_and_is_for_gpus() -> None:
    found = checked("model_engine=megatron", f"{ACTOR}.ppo_mini_batch_size=4", is_gpu=True)
    assert (found.num_mini_batches, found.num_steps) == (2, 2)
    composed = config.compose(["model_engine=megatron"], RUN, is_gpu=True)
    assert composed.actor_rollout_ref.actor.strategy == "megatron"
    with pytest.raises(SettingsError, match="strategy=megatron: on a CPU verl has FSDP2 alone"):
        checked("model_engine=megatron")


def test_an_override_that_verl_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"Could not override 'actor_rollout_ref.nonsense'"):
        config.compose(["actor_rollout_ref.nonsense=1"], RUN)


def test_a_preview_shows_the_same_steps_for_every_shape_of_rollout() -> None:
    lines = preview(RUN, checked(f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2"))
    assert [line[1] for line in lines] == [32, 64, 96, 63]
    assert {line[-1] for line in lines} == {8}
    assert all((rows + padding) == 4 * per for _, rows, padding, per, _, _ in lines)


def test_a_ratio_per_row_is_pointed_out_at_start_with_the_remedy() -> None:
    gspo = config.compose([f"{ACTOR}.policy_loss.loss_mode=gspo"], RUN)
    (caution,) = config.cautions(gspo)
    assert "keep history_mode=linear, or use a loss with a ratio for each token" in caution
    # Corrections per sequence are per rollout here, so there is nothing to say about them.
    sequence = "algorithm.rollout_correction.rollout_is=sequence"
    assert config.cautions(config.compose([sequence], RUN)) == []


@pytest.mark.field_case("AReaL#1290")
def test_a_limit_on_a_mismatch_that_nobody_measures_is_refused() -> None:
    bypass = config.compose(["algorithm.rollout_correction.bypass_mode=true"], RUN)
    config.check_gate(bypass, None)
    config.check_gate(config.compose([], RUN), 0.1)
    with pytest.raises(SettingsError, match="computes no logprobs to compare with"):
        config.check_gate(bypass, 0.1)


@pytest.mark.field_case("prime-rl#2601")
@pytest.mark.parametrize("override", [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20"])
def test_truncated_sampling_is_refused_because_its_logprobs_do_not_compare(override: str) -> None:
    with pytest.raises(SettingsError, match=r"whole vocabulary.*sample without truncation"):
        checked(override)


def test_a_setting_of_verl_that_nothing_reads_here_is_pointed_out_with_what_stands_for_it() -> None:
    overrides = [
        "trainer.save_freq=5",
        "algorithm.filter_groups.enable=true",
        f"{ACTOR}.ppo_epochs=2",
    ]
    composed = config.compose([o for o in overrides if "filter" not in o], RUN)
    assert config.cautions(composed, overrides) == [
        "trainer.save_freq is not read here; instead: TURNFOLD_CHECKPOINT_EVERY",
        "algorithm.filter_groups.enable is not read here; instead: "
        "TURNFOLD_IS_ZERO_VARIANCE_DROPPED",
    ]


@pytest.mark.parametrize("name", config.NOT_READ)
def test_what_is_said_not_to_be_read_is_a_setting_of_verl(name: str) -> None:
    from omegaconf import OmegaConf

    missing = object()
    assert OmegaConf.select(config.compose([], RUN), name, default=missing) is not missing
