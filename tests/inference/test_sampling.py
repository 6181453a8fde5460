import math

import pytest
import torch

from turnfold.embedded.inference.sampling import SamplingParams, processed_logprobs, sample

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
INF = math.inf


def chosen(uniform: float, **params: float) -> int:
    return sample(LOGITS, [SamplingParams(**params)], [uniform])[0].token_id  # type: ignore[arg-type]


def test_the_uniform_number_picks_the_token_whose_probability_range_holds_it() -> None:
    # Ranges: token 0 up to 0.1, token 1 up to 0.5, token 2 up to 0.7, token 3 up to 1.
    assert [chosen(u) for u in (0.0, 0.09, 0.11, 0.49, 0.51, 0.69, 0.71, 0.999999)] == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip


def test_temperature_zero_takes_the_likeliest_token_and_reports_the_plain_logprob() -> None:
    [token] = sample(LOGITS, [SamplingParams(temperature=0, top_k=1)], [0.99])
    assert (token.token_id, token.rank) == (1, 1)
    assert token.logprob == pytest.approx(math.log(0.4))


def test_temperature_scales_the_logits_before_the_logprobs_are_taken() -> None:
    logprobs = processed_logprobs(LOGITS, [SamplingParams(temperature=0.5)])
    squares = torch.tensor([0.01, 0.16, 0.04, 0.09])
    torch.testing.assert_close(logprobs[0], (squares / squares.sum()).log())


def test_top_k_renormalises_over_the_tokens_it_keeps() -> None:
    logprobs = processed_logprobs(LOGITS, [SamplingParams(top_k=2)])
    expected = torch.tensor([-INF, math.log(4 / 7), -INF, math.log(3 / 7)])
    torch.testing.assert_close(logprobs[0], expected)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logprobs = processed_logprobs(LOGITS, [SamplingParams(top_p=0.6)])
    expected = torch.tensor([-INF, math.log(4 / 7), -INF, math.log(3 / 7)])
    torch.testing.assert_close(logprobs[0], expected)


def test_a_token_that_was_cut_off_is_never_sampled() -> None:
    assert {chosen(u / 100, top_k=2) for u in range(100)} == {1, 3}


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = LOGITS.repeat(3, 1)
    params = [SamplingParams(top_k=1), SamplingParams(), SamplingParams(temperature=0)]
    tokens = sample(logits, params, [0.99, 0.99, 0.99])
    assert [t.token_id for t in tokens] == [1, 3, 1]
    assert tokens[0].logprob == pytest.approx(0.0)
    assert tokens[1].logprob == pytest.approx(math.log(0.3))


def test_the_rank_counts_the_likelier_tokens() -> None:
    assert sample(LOGITS, [SamplingParams()], [0.6])[0].rank == 3


def test_as_many_top_logprobs_are_reported_as_were_asked_for() -> None:
    params = [
        SamplingParams(num_top_logprobs=2),
        SamplingParams(),
        SamplingParams(num_top_logprobs=9),
    ]
    first, second, third = sample(LOGITS.repeat(3, 1), params, [0.6, 0.6, 0.6])
    assert [(t.token_id, t.rank) for t in first.top] == [(1, 1), (3, 2)]
    assert second.top == ()
    assert [t.token_id for t in third.top] == [1, 3, 2, 0]


def test_top_logprobs_leave_out_what_was_cut_off() -> None:
    [token] = sample(LOGITS, [SamplingParams(num_top_logprobs=4, top_k=2)], [0.0])
    assert [t.token_id for t in token.top] == [1, 3]
