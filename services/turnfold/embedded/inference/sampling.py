"""From logits to sampled tokens with their logprobs. Randomness comes in as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples. Temperature 0 is greedy, and then top-k and top-p have no effect."""

    max_tokens: int | None = None
    """At most so many output tokens; None fills the context. Always clamped to the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens, whatever else runs in the batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; the tokens that complete one are kept."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_top_logprobs: int = 0
    """How many of the likeliest tokens to report next to each sampled one."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token and how likely it was after temperature, top-k and top-p. Rank 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class SampledToken:
    """One sampled token, and the likeliest tokens at its place when they were asked for."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...] = ()


def sample(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[SampledToken]:
    """Sample one token per row: invert its cumulative distribution at its uniform number.

    `logits_BV` is float32 on the CPU; row b is sampled with `params[b]` at `uniforms[b]`, which is
    in [0, 1).
    """
    logprobs_BV = processed_logprobs(logits_BV, params)
    token_ids = _invert_distribution(logprobs_BV, uniforms)
    greedy_ids = logits_BV.argmax(dim=-1)
    is_greedy = torch.tensor([p.temperature == 0 for p in params])
    token_ids = torch.where(is_greedy, greedy_ids, token_ids)
    chosen_B1 = logprobs_BV.gather(-1, token_ids[:, None])
    ranks = (logprobs_BV > chosen_B1).sum(-1) + 1
    tops = _likeliest(logprobs_BV, params)
    rows = zip(token_ids.tolist(), chosen_B1[:, 0].tolist(), ranks.tolist(), tops, strict=True)
    return [SampledToken(token, logprob, rank, top) for token, logprob, rank, top in rows]


def processed_logprobs(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logprobs of what is really sampled from: -inf where top-k or top-p cut a token off."""
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=logits_BV.dtype)
    scaled_BV = logits_BV / temperatures[:, None]
    if any(_is_truncating(p) for p in params):
        scaled_BV = _truncate(scaled_BV, params)
    return torch.log_softmax(scaled_BV, dim=-1)


def _truncate(scaled_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the top-k tokens, then the fewest of them whose probabilities reach top-p."""
    vocab_size = scaled_BV.shape[-1]
    cuts = [(p.top_k, p.top_p) if _is_truncating(p) else (0, 1.0) for p in params]
    ks = torch.tensor([k if k > 0 else vocab_size for k, _ in cuts])
    ps = torch.tensor([p for _, p in cuts])
    sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True)
    cut_BV = torch.arange(vocab_size) >= ks[:, None]
    probabilities_BV = sorted_BV.masked_fill(cut_BV, -torch.inf).softmax(-1)
    mass_before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    cut_BV |= (mass_before_BV >= ps[:, None]) & (ps[:, None] < 1)
    kept_BV = sorted_BV.masked_fill(cut_BV, -torch.inf)
    return torch.empty_like(scaled_BV).scatter(-1, order_BV, kept_BV)


def _is_truncating(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def _invert_distribution(logprobs_BV: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the row's uniform number.

    In float64, so that small probabilities add up; scaled by the last sum, so that rounding never
    leaves the row without an answer. A token of probability 0 adds nothing to the sum and so is
    never first.
    """
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    thresholds_B1 = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative_BV[:, -1:]
    return (cumulative_BV <= thresholds_B1).sum(-1)


def _likeliest(
    logprobs_BV: torch.Tensor, params: Sequence[SamplingParams]
) -> list[tuple[TokenLogprob, ...]]:
    num_wanted = max(p.num_top_logprobs for p in params)
    if num_wanted == 0:
        return [()] * len(params)
    values_BK, ids_BK = logprobs_BV.topk(min(num_wanted, logprobs_BV.shape[-1]), dim=-1)
    tops = []
    for ids, values, p in zip(ids_BK.tolist(), values_BK.tolist(), params, strict=True):
        ranked = zip(ids, values, range(1, p.num_top_logprobs + 1), strict=False)
        tops.append(tuple(TokenLogprob(*entry) for entry in ranked if entry[1] > -torch.inf))
    return tops
