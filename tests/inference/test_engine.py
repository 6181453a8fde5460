import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from turnfold.embedded.inference.engine import Engine, EngineStoppedError
from turnfold.embedded.inference.model import SlotModel
from turnfold.embedded.inference.sampling import SampledToken, SamplingParams
from turnfold.embedded.inference.sequences import Completion, GenerationRequest, StopRules
from turnfold.embedded.inference.weights import WeightsError, read_weights

TIMEOUT_S = 60
LOGPROB_TOLERANCE = 1e-4


def request(
    prompt: list[int], request_id: str = "r", *, cache_salt: str | None = None, **params: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        cache_salt=cache_salt,
    )


def generate(engine: Engine, prompt: list[int], **params: Any) -> Completion:
    return engine.submit(request(prompt, **params)).result(TIMEOUT_S)


def ids(completion: Completion) -> list[int]:
    return [token.token_id for token in completion.tokens]


def forward_logprobs(
    model: Any, prompt: list[int], output: list[int], temperature: float = 1.0
) -> list[float]:
    """Logprobs of the output tokens by one plain forward pass over prompt and output."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return [float(logprobs[i, token]) for i, token in enumerate(output)]


def error_against(model: Any, prompt: list[int], completion: Completion, start: int = 0) -> float:
    """Largest distance between the reported logprobs and those of a plain forward pass."""
    plain = forward_logprobs(model, prompt, ids(completion))
    pairs = zip(completion.tokens[start:], plain[start:], strict=True)
    return max(abs(token.logprob - logprob) for token, logprob in pairs)


class CallAt:
    """Calls a function on the engine's thread when the n-th token is sampled."""

    def __init__(self, count: int, function: Any) -> None:
        self._left, self._function = count, function

    def __call__(self, token: SampledToken) -> None:
        self._left -= 1
        if self._left == 0:
            self._function()


def test_logprobs_equal_a_plain_forward_pass_for_ragged_concurrent_requests(
    engine: Engine, plain_model: Any
) -> None:
    # Twelve requests over five slots, so that they also join and leave a running batch.
    prompts = [[(7 * i + j) % 370 for j in range(1 + 9 * i)] for i in range(12)]
    futures = [
        engine.submit(request(prompt, max_tokens=5 + 3 * i, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    for prompt, future in zip(prompts, futures, strict=True):
        assert error_against(plain_model, prompt, future.result(TIMEOUT_S)) < LOGPROB_TOLERANCE


def test_logprobs_are_those_after_temperature(engine: Engine, plain_model: Any) -> None:
    completion = generate(engine, [1, 2, 3], max_tokens=20, seed=1, temperature=0.7)
    plain = forward_logprobs(plain_model, [1, 2, 3], ids(completion), temperature=0.7)
    assert [t.logprob for t in completion.tokens] == pytest.approx(plain, abs=LOGPROB_TOLERANCE)


def test_a_long_prompt_is_computed_in_chunks_with_the_same_logprobs(
    model_dir: Path, plain_model: Any
) -> None:
    prompt = [i % 370 for i in range(1200)]
    with Engine(SlotModel(model_dir, num_slots=1, max_len=1300), StopRules()) as engine:
        completion = generate(engine, prompt, max_tokens=8, seed=0)
    assert error_against(plain_model, prompt, completion) < LOGPROB_TOLERANCE


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    alone = generate(engine, [5, 6, 7], max_tokens=30, seed=42)
    crowd = [engine.submit(request([i] * (i + 1), max_tokens=40)) for i in range(8)]
    in_batch = engine.submit(request([5, 6, 7], max_tokens=30, seed=42))
    assert ids(in_batch.result(TIMEOUT_S)) == ids(alone)
    assert all(len(future.result(TIMEOUT_S).tokens) == 40 for future in crowd)


def test_requests_without_a_seed_differ(engine: Engine) -> None:
    outputs = {tuple(ids(generate(engine, [1, 2], max_tokens=12))) for _ in range(4)}
    assert len(outputs) > 1


def test_an_output_ends_at_its_length_or_at_the_end_of_the_context(engine: Engine) -> None:
    assert len(generate(engine, [1] * 10, max_tokens=7).tokens) == 7
    clamped = generate(engine, [1] * 250, max_tokens=100)
    assert (len(clamped.tokens), clamped.finish_reason) == (6, "length")
    assert len(generate(engine, [1] * 250).tokens) == 6


def test_the_end_of_sequence_token_is_kept_and_has_no_stop_reason(
    model_dir: Path, engine: Engine
) -> None:
    greedy = ids(generate(engine, [1, 2, 3], max_tokens=10, temperature=0))
    rules = StopRules(eos_token_ids=(greedy[3], 369))
    expected = greedy[: greedy.index(greedy[3]) + 1]
    with Engine(SlotModel(model_dir, num_slots=1, max_len=64), rules) as stopping:
        ended = generate(stopping, [1, 2, 3], max_tokens=10, temperature=0)
        ignored = generate(stopping, [1, 2, 3], max_tokens=10, temperature=0, ignore_eos=True)
    assert (ids(ended), ended.finish_reason, ended.stop_reason) == (expected, "stop", None)
    assert (ids(ignored), ignored.finish_reason) == (greedy, "length")


def test_a_further_end_of_sequence_id_and_a_stop_id_are_the_stop_reason(
    model_dir: Path, engine: Engine
) -> None:
    greedy = ids(generate(engine, [1, 2, 3], max_tokens=10, temperature=0))
    by_stop_id = generate(engine, [1, 2, 3], temperature=0, stop_token_ids=frozenset([greedy[3]]))
    rules = StopRules(eos_token_ids=(369, greedy[3]))
    with Engine(SlotModel(model_dir, num_slots=1, max_len=64), rules) as stopping:
        by_eos = generate(stopping, [1, 2, 3], temperature=0)
    for ended in (by_stop_id, by_eos):
        assert (ended.finish_reason, ended.stop_reason) == ("stop", greedy[3])
        assert ids(ended)[-1] == greedy[3]


def test_a_stop_string_across_tokens_keeps_the_tokens_that_complete_it(model_dir: Path) -> None:
    # Token 2 is special and has no text; every other token reads as one letter.
    def decode(token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)

    rules = StopRules(special_token_ids=frozenset([2]), decode=decode)
    with Engine(SlotModel(model_dir, num_slots=1, max_len=64), rules) as engine:
        greedy = ids(generate(engine, [1, 2, 3], max_tokens=12, temperature=0))
        spoken = [token for token in greedy if token != 2]
        stop = decode(spoken[2:5])
        ended = generate(engine, [1, 2, 3], max_tokens=12, temperature=0, stop=("#", stop))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ids(ended) == greedy[: len(ids(ended))]
    assert decode([t for t in ids(ended) if t != 2]).endswith(stop)


def test_an_aborted_request_returns_what_it_has(engine: Engine, plain_model: Any) -> None:
    abort = CallAt(10, lambda: engine.abort(["long"]))
    future = engine.submit(request([1, 2], "long", max_tokens=200, seed=0), abort)
    completion = future.result(TIMEOUT_S)
    assert (completion.finish_reason, completion.stop_reason) == ("abort", None)
    assert len(completion.tokens) == 10
    assert error_against(plain_model, [1, 2], completion) < LOGPROB_TOLERANCE


def test_an_abort_names_how_many_were_in_flight_and_frees_their_slots(engine: Engine) -> None:
    engine.pause("keep").result(TIMEOUT_S)
    futures = [engine.submit(request([i + 1], str(i), max_tokens=50)) for i in range(9)]
    assert engine.abort(["3", "4", "unknown"]).result(TIMEOUT_S) == 2
    assert engine.abort().result(TIMEOUT_S) == 7
    assert {f.result(TIMEOUT_S).finish_reason for f in futures} == {"abort"}
    engine.resume().result(TIMEOUT_S)
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert len(generate(engine, [1], max_tokens=4).tokens) == 4


def test_keep_freezes_what_runs_and_holds_back_what_arrives(engine: Engine) -> None:
    untouched = ids(generate(engine, [1, 2], max_tokens=30, seed=3))
    running = engine.submit(
        request([1, 2], max_tokens=30, seed=3), CallAt(10, lambda: engine.pause("keep"))
    )
    wait_for(lambda: engine.is_paused)
    arriving = engine.submit(request([4], max_tokens=2))
    engine.set_version("0").result(TIMEOUT_S)
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    assert not running.done()
    engine.resume().result(TIMEOUT_S)
    assert ids(running.result(TIMEOUT_S)) == untouched
    assert len(arriving.result(TIMEOUT_S).tokens) == 2


def test_wait_lets_what_runs_finish_and_holds_back_what_arrives(engine: Engine) -> None:
    pauses: list[Future[None]] = []
    arrivals: list[Future[Completion]] = []

    def pause() -> None:
        pauses.append(engine.pause("wait"))
        arrivals.append(engine.submit(request([4], max_tokens=2)))

    running = engine.submit(request([1, 2], max_tokens=30), CallAt(10, pause))
    assert len(running.result(TIMEOUT_S).tokens) == 30
    pauses[0].result(TIMEOUT_S)
    assert engine.is_paused
    assert not arrivals[0].done()
    engine.resume().result(TIMEOUT_S)
    assert len(arrivals[0].result(TIMEOUT_S).tokens) == 2


def test_a_resume_ends_a_wait_that_has_not_drained(engine: Engine) -> None:
    pauses: list[Future[None]] = []

    def pause_and_resume() -> None:
        pauses.append(engine.pause("wait"))
        engine.resume()

    running = engine.submit(request([1, 2], max_tokens=30), CallAt(10, pause_and_resume))
    assert len(running.result(TIMEOUT_S).tokens) == 30
    pauses[0].result(TIMEOUT_S)
    assert not engine.is_paused


def test_a_pause_by_abort_ends_what_is_in_flight(engine: Engine) -> None:
    future = engine.submit(
        request([1, 2], max_tokens=200), CallAt(10, lambda: engine.pause("abort"))
    )
    completion = future.result(TIMEOUT_S)
    assert (completion.finish_reason, len(completion.tokens)) == ("abort", 10)
    wait_for(lambda: engine.is_paused)


def test_a_swap_lands_between_two_tokens_and_the_rest_is_exactly_the_new_model(
    engine: Engine, plain_model: Any, other_plain_model: Any, other_model_dir: Path
) -> None:
    weights = read_weights(other_model_dir)

    def swap() -> None:
        engine.load_weights(weights)
        engine.set_version("1")

    prompt = list(range(40, 60))
    swapping = engine.submit(request(prompt, max_tokens=60, seed=0), CallAt(25, swap))
    completion = swapping.result(TIMEOUT_S)
    spans = [(s.version, s.start, s.end) for s in completion.weight_versions]
    assert spans == [("0", 0, 25), ("1", 25, 60)]
    output = ids(completion)
    old = forward_logprobs(plain_model, prompt, output)
    new = forward_logprobs(other_plain_model, prompt, output)
    # The new weights see a cache that they computed themselves, as if the prompt had been longer.
    reported = [token.logprob for token in completion.tokens]
    assert reported == pytest.approx(old[:25] + new[25:], abs=LOGPROB_TOLERANCE)
    assert abs(old[30] - new[30]) > 0.01


def test_frozen_requests_are_recomputed_too(
    engine: Engine, other_plain_model: Any, other_model_dir: Path
) -> None:
    prompts = [[i + 1] * (5 * i + 1) for i in range(4)]
    engine.pause("keep").result(TIMEOUT_S)
    futures = [
        engine.submit(request(prompt, max_tokens=20, seed=i)) for i, prompt in enumerate(prompts)
    ]
    engine.load_weights(read_weights(other_model_dir)).result(TIMEOUT_S)
    engine.set_version("7").result(TIMEOUT_S)
    engine.resume().result(TIMEOUT_S)
    for prompt, future in zip(prompts, futures, strict=True):
        completion = future.result(TIMEOUT_S)
        assert [s.version for s in completion.weight_versions] == ["7"]
        assert error_against(other_plain_model, prompt, completion) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weights: weights.pop("lm_head.weight"),
        lambda weights: weights.update(extra=torch.zeros(1)),
        lambda weights: weights.update({"lm_head.weight": torch.zeros(3, 64)}),
        lambda weights: weights["model.norm.weight"].fill_(torch.nan),
    ],
    ids=["missing", "foreign", "shape", "not finite"],
)
def test_weights_that_do_not_fit_leave_the_old_ones_serving(
    engine: Engine, other_model_dir: Path, spoil: Any
) -> None:
    before = ids(generate(engine, [1, 2, 3], max_tokens=20, seed=0))
    weights = read_weights(other_model_dir)
    spoil(weights)
    with pytest.raises(WeightsError):
        engine.load_weights(weights)
    assert ids(generate(engine, [1, 2, 3], max_tokens=20, seed=0)) == before


def test_a_follow_up_turn_reuses_the_prefix_of_the_turn_before(
    engine: Engine, plain_model: Any
) -> None:
    prompt = list(range(1, 30))
    first = generate(engine, prompt, max_tokens=10, seed=0)
    history = prompt + ids(first) + [50, 51, 52]
    second = generate(engine, history, max_tokens=10, seed=1)
    # The last token of the first turn was sampled but never run.
    assert second.num_cached_tokens == len(prompt) + 9
    assert error_against(plain_model, history, second) < LOGPROB_TOLERANCE


def test_no_prefix_survives_a_weight_swap_or_a_reset(
    engine: Engine, model_dir: Path, other_model_dir: Path
) -> None:
    prompt = list(range(1, 30))
    generate(engine, prompt, max_tokens=2)
    assert generate(engine, prompt, max_tokens=2).num_cached_tokens == 28
    engine.load_weights(read_weights(other_model_dir)).result(TIMEOUT_S)
    assert generate(engine, prompt, max_tokens=2).num_cached_tokens == 0
    engine.reset_prefix_cache().result(TIMEOUT_S)
    assert generate(engine, prompt, max_tokens=2).num_cached_tokens == 0


def test_a_cache_salt_keeps_prefixes_apart(engine: Engine) -> None:
    prompt = list(range(1, 30))
    for salt, expected in [("a", 0), ("a", 28), ("b", 0), (None, 0)]:
        completion = engine.submit(request(prompt, max_tokens=2, cache_salt=salt))
        assert completion.result(TIMEOUT_S).num_cached_tokens == expected


def test_counts_add_up(engine: Engine) -> None:
    prompt = list(range(1, 30))
    for _ in range(2):
        generate(engine, prompt, max_tokens=5)
    counts = engine.counts
    assert (counts.prompt_tokens, counts.cached_tokens, counts.generated_tokens) == (58, 28, 10)
    assert (counts.finished_length, counts.finished_abort) == (2, 0)


def test_closing_answers_what_is_in_flight(model_dir: Path) -> None:
    engine = Engine(SlotModel(model_dir, num_slots=1, max_len=4000), StopRules())
    sampled = threading.Event()
    with engine:
        running = engine.submit(request([1]), CallAt(3, sampled.set))
        waiting = engine.submit(request([2]))
        assert sampled.wait(TIMEOUT_S)
    assert running.result(TIMEOUT_S).finish_reason == "abort"
    assert waiting.result(TIMEOUT_S).finish_reason == "abort"
    with pytest.raises(EngineStoppedError, match="closed"):
        engine.submit(request([1]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_step_is_told_to_every_caller_and_to_later_ones(model_dir: Path) -> None:
    told = threading.Event()
    late: list[Future[Any]] = []
    engine = Engine(SlotModel(model_dir, num_slots=1, max_len=64), StopRules())

    def fail() -> None:
        # What is queued in the very step that fails must not be left waiting either.
        late.extend([engine.submit(request([3])), engine.pause("wait"), engine.abort()])
        raise RuntimeError("broken")

    engine.start(on_failure=told.set)
    engine.pause("keep").result(TIMEOUT_S)
    running = engine.submit(request([1]), CallAt(3, fail))
    waiting = engine.submit(request([2]))
    engine.resume()
    assert told.wait(TIMEOUT_S)
    for future in (running, waiting, *late):
        with pytest.raises(EngineStoppedError, match="broken"):
            future.result(TIMEOUT_S)
    with pytest.raises(EngineStoppedError):
        engine.submit(request([1]))
    engine.close()
    assert not engine.is_alive
    assert str(engine.failure) == "broken"


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, or fail."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)
