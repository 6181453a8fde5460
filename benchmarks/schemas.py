"""Cost of a long turn on the wire, and of a long session in the log.

    python benchmarks/schemas.py

Prints one JSON object. `encode_ms` and `decode_ms` are medians for a turn of 100,000 output tokens.
`session` is a conversation of 100 turns that grows to 100,000 tokens: bytes of all its events before
compression, also over 8 bytes a final token (an id and a logprob), with and without the text of
its messages, and what it would be if every turn sent its whole prompt.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from turnfold.schemas import codec
from turnfold.schemas.events import Event, TurnCompleted, VersionSpan
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.wire import Logprobs, TokenIds

VOCABULARY = 151_936
WORDS = ("the", "value", "of", "self", "return", "error", "in", "line", "data", "request", "=", "(")


def long_turn(num_tokens: int) -> TurnCompleted:
    rng = np.random.default_rng(7)
    return TurnCompleted(
        rollout_id="run-000003-01",
        event_id="0193a1f2-7f1e",
        session_id="main",
        turn_id="t0",
        prompt_tail=TokenIds.of([1]),
        output_ids=TokenIds.of(rng.zipf(1.3, num_tokens) % VOCABULARY),
        logprobs=Logprobs.of(-rng.exponential(0.5, num_tokens)),
        num_prompt_tokens=1,
        policy_versions=(VersionSpan(policy_version=7, start=0, end=num_tokens),),
    )


def median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(times), 4)


def one_event(repeats: int) -> dict[str, float]:
    event = long_turn(100_000)
    packed, as_json = codec.encode(event), codec.encode_json(event)
    return {
        "bytes": len(packed),
        "encode_ms": median_ms(lambda: codec.encode(event), repeats),
        "decode_ms": median_ms(lambda: codec.decode(Event, packed), repeats),
        "json_bytes": len(as_json),
        "json_encode_ms": median_ms(lambda: codec.encode_json(event), repeats // 10),
        "json_decode_ms": median_ms(
            lambda: codec.decode(Event, as_json, codec.JSON), repeats // 10
        ),
    }


def session(num_turns: int, num_tokens: int, sampled_share: float) -> dict[str, float]:
    """Every turn adds a tool result and an answer; `sampled_share` of the tokens are sampled."""
    a_turn = num_tokens // num_turns
    num_output = int(a_turn * sampled_share)
    bare = with_text = whole = length = 0
    for index in range(num_turns):
        num_tail = a_turn - num_output
        event = TurnCompleted(
            rollout_id="run-000003-01",
            event_id=f"run-000003-01:t{index}",
            session_id="main",
            turn_id=f"t{index}",
            parent_turn_id=f"t{index - 1}" if index else None,
            shared_len=length,
            prompt_tail=TokenIds.of(range(num_tail)),
            output_ids=TokenIds.of(range(num_output)),
            logprobs=Logprobs.of([-0.5] * num_output),
            num_prompt_tokens=length + num_tail,
            continuity="extended",
            policy_versions=(VersionSpan(policy_version=7, start=0, end=num_output),),
            protocol="openai_chat",
            model="policy",
            request_digest="6f" * 32,
        )
        bare += len(codec.encode(event))
        messages = ChatMessage(role="tool", content=text(num_tail), tool_call_id="call-1")
        reply = ChatMessage(role="assistant", content=text(num_output))
        with_text += (
            len(codec.encode(event)) + len(codec.encode(messages)) + len(codec.encode(reply))
        )
        whole += len(codec.encode(event)) + length * TokenIds.dtype.itemsize
        length += a_turn
    return {
        "num_turns": num_turns,
        "num_tokens": length,
        "sampled_share": sampled_share,
        "bytes": bare,
        "over_8_bytes_a_token": round(bare / (8 * length), 3),
        "bytes_with_text": with_text,
        "with_text_over_8_bytes_a_token": round(with_text / (8 * length), 3),
        "bytes_if_prompts_were_whole": whole,
    }


def text(num_tokens: int) -> str:
    """About four characters a token, as English and code have."""
    words = random.Random(num_tokens)
    return " ".join(words.choice(WORDS) for _ in range(num_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    result = {
        "event_of_100k_tokens": one_event(options.repeats),
        "session": [session(100, 100_000, share) for share in (0.3, 0.5, 1.0)],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
