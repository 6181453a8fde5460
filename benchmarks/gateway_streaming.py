"""CPU of a streamed reply: tokens to text to parts to events, one token at a time.

    python benchmarks/gateway_streaming.py path/to/tokenizer.json

Prints, for a reply of text and for one long call, the CPU time of a token and of the longest step.
Needs a tokenizer of the Qwen family.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import tokenizers

from turnfold.gateway.calls import AnswerHead, ModelCall
from turnfold.gateway.parsing.qwen import FORMAT
from turnfold.gateway.parsing.replies import Situation
from turnfold.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from turnfold.gateway.protocols.protocol import ModelProtocol
from turnfold.gateway.turns.sampling.reply import LiveReply
from turnfold.history.render import TemplateRenderer

PROTOCOLS: list[ModelProtocol] = [openai_chat, openai_responses, anthropic_messages]
TURN = "0" * 32


def main(tokenizer_file: Path) -> None:
    """Read both replies in each protocol."""
    if tokenizer_file.is_dir():
        tokenizer_file /= "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    renderer = TemplateRenderer(tokenizer, "")
    for name, text in replies().items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for protocol in PROTOCOLS:
            total_s, worst_s = measured(renderer, protocol, ids)
            print(
                f"{name}, {protocol.NAME}: {len(ids)} tokens, {total_s / len(ids) * 1e6:.0f} µs a "
                f"token, longest step {worst_s * 1e3:.1f} ms"
            )


def replies() -> dict[str, str]:
    """Python code as what the model thinks and says, and as what it writes to a file."""
    code = Path(__file__).read_text() * 12
    call = {"name": "write", "arguments": {"text": code}}
    return {
        "text": f"<think>\n{code}</think>\n\n{code}",
        "call": f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
    }


def measured(renderer: Any, protocol: ModelProtocol, ids: list[int]) -> tuple[float, float]:
    """CPU seconds of all steps, and of the longest."""
    reply = LiveReply(
        renderer, FORMAT.begin(Situation()), stops=["@@@"], turn_id=TURN, has_logprobs=False
    )
    head = AnswerHead(turn_id=TURN, created=0, model="m", num_prompt_tokens=1)
    stream = protocol.begin_stream(head, ModelCall(protocol="", model="m", messages=()))
    steps = []
    for token_id in ids:
        begun = time.thread_time()
        for piece in reply.feed([token_id]):
            for _ in stream.add(piece):
                pass
        steps.append(time.thread_time() - begun)
    return sum(steps), max(steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
