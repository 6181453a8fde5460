"""Bodies of requests and responses in the shapes of vLLM's HTTP API, and the engine's terms."""

import math
from typing import Annotated, Any, Literal

import msgspec

from turnfold.embedded.inference.sampling import SampledToken, SamplingParams
from turnfold.embedded.inference.sequences import Completion

REQUEST_ID_PREFIX = "generate-tokens-"
"""What vLLM puts before the client's request id; aborting takes the id with it."""

MAX_TOP_LOGPROBS = 20

NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class ApiError(Exception):
    """An error that a client caused, as `{"error": {"message", "type", "param", "code"}}`."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param


class UnsupportedSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters that this server can't honour: accepted only when they change nothing."""

    n: int = 1
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


class SamplingBody(UnsupportedSampling, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a generate request.

    An unknown name is an error here. vLLM would ignore it, and a misspelt limit fills the context.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: NonNegative = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    seed: int | None = None
    stop: str | list[Annotated[str, msgspec.Meta(min_length=1)]] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    # Accepted without effect: they shape text, and this server answers with tokens.
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int | None = None
    extra_args: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`: whether a last chunk reports the usage."""

    include_usage: bool = False


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: SamplingBody = msgspec.field(default_factory=SamplingBody)
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool = False
    output_mode: Literal["tokens"] = "tokens"


class AbortBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/abort_requests: ids with their prefix. None, for /abort_requests only, is
    all of them.
    """

    request_ids: list[str] | None = None


class ReloadArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`kwargs` of reload_weights. Without a path the directory that the server was started on is
    read again.
    """

    weights_path: str | None = None


class RpcBody(msgspec.Struct, kw_only=True):
    """POST /collective_rpc."""

    method: str
    kwargs: ReloadArguments = msgspec.field(default_factory=ReloadArguments)


class VersionBody(msgspec.Struct, kw_only=True):
    """POST /update_weight_version."""

    new_version: str


class TopLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int


class TokenLogprobBody(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[TopLogprob]


class LogprobsBody(msgspec.Struct):
    content: list[TokenLogprobBody]


class WeightVersionBody(msgspec.Struct):
    version: str
    start: int
    end: int


class ChoiceBody(msgspec.Struct, kw_only=True):
    """The one choice of a response, or the part of it that a streamed chunk adds."""

    index: int = 0
    token_ids: list[int]
    logprobs: LogprobsBody | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionBody] | None = None
    routed_experts: None = None
    sampling_mask: None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class GenerateResponse(msgspec.Struct, kw_only=True):
    """Answer of /inference/v1/generate, and one chunk of its stream."""

    request_id: str
    model: str
    created: int
    choices: list[ChoiceBody]
    usage: UsageBody | None = None
    prompt_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    output_mode: str = "tokens"


def sampling_params(body: SamplingBody) -> SamplingParams:
    """The engine's sampling parameters. Raises ApiError for what the engine can't do."""
    for field in msgspec.structs.fields(UnsupportedSampling):
        asked = getattr(body, field.name)
        if asked is not None and asked != field.default:
            raise ApiError(
                f"{field.name}={asked!r} is not supported by this server; leave it out",
                param=field.name,
            )
    if not math.isfinite(body.temperature):
        raise ApiError("temperature should be a finite number", param="temperature")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(stop for stop in stops if stop),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        num_top_logprobs=body.logprobs or 0,
    )


def check_prompt(token_ids: list[int], *, vocab_size: int, max_model_len: int) -> None:
    """Raise ApiError unless the model can run on this prompt and has room for at least one more
    token.
    """
    if not token_ids:
        raise ApiError("token_ids is empty: a prompt needs at least one token", param="token_ids")
    unknown = next((t for t in token_ids if not 0 <= t < vocab_size), None)
    if unknown is not None:
        raise ApiError(
            f"Token id {unknown} is out of vocabulary: ids go from 0 to {vocab_size - 1}",
            param="token_ids",
        )
    if len(token_ids) >= max_model_len:
        raise ApiError(
            f"The prompt has {len(token_ids)} tokens, but this model's context of {max_model_len}"
            " tokens must also hold at least one output token",
            param="token_ids",
        )


def choice(completion: Completion, *, with_logprobs: bool) -> ChoiceBody:
    """A finished completion as the choice of a plain response."""
    return ChoiceBody(
        token_ids=[token.token_id for token in completion.tokens],
        logprobs=logprobs(completion.tokens) if with_logprobs else None,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        weight_versions=weight_versions(completion),
    )


def logprobs(tokens: tuple[SampledToken, ...]) -> LogprobsBody:
    """The logprobs of these tokens, one entry each."""
    return LogprobsBody(
        [
            TokenLogprobBody(
                token.token_id,
                token.logprob,
                token.rank,
                [TopLogprob(top.token_id, top.logprob, top.rank) for top in token.top],
            )
            for token in tokens
        ]
    )


def weight_versions(completion: Completion) -> list[WeightVersionBody]:
    """Which version sampled which output tokens."""
    spans = completion.weight_versions
    return [WeightVersionBody(span.version, span.start, span.end) for span in spans]


def usage(completion: Completion) -> UsageBody:
    """Token counts of a finished completion."""
    num_output = len(completion.tokens)
    return UsageBody(
        prompt_tokens=completion.num_prompt_tokens,
        completion_tokens=num_output,
        total_tokens=completion.num_prompt_tokens + num_output,
        prompt_tokens_details=PromptDetails(completion.num_cached_tokens),
    )


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error response."""
    kinds = {400: "BadRequestError", 404: "NotFoundError", 405: "BadRequestError"}
    kind = kinds.get(error.status, "InternalServerError")
    detail = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    return {"error": detail}
