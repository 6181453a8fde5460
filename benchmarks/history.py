"""Healing: what a turn costs, and what it saves in training rows and tokens.

    python benchmarks/history.py
    python benchmarks/history.py --model ./model --traces ./traces --reference v/bin/python
    python benchmarks/history.py --model ./tiny --update          (`turnfold tiny-model --out ./tiny`)

Prints one JSON object.

`cpu_ms` is the mean CPU time of a turn's plan and fold, over the last turns of a conversation that
grew to so many tokens and messages; its client hands the arguments of every call back in another
order, so that linear mode heals every turn and tree mode forks. With `--reference`, an environment
that has agentcore-rl-toolkit 0.2.0 runs the same conversations (see history_reference/heal.py).

`memory` is what a session holds after such a conversation, caches included, in bytes.

`rows` replays conversations at a drift of 0, 0.3 and 1, which is the share of replies that come
back otherwise than they were sampled: the arguments of a call in another order or, where there is
none, a tenth of the words in other tokens. `processed_tokens` is the sum of the lengths of all rows.

`actor_update`, with `--update`, is the time of verl's update on such rows, tree against linear.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.gateway.protocols.openai_messages import read_messages
from turnfold.healer.fold import fold, open_rollout
from turnfold.healer.lineage import resolve
from turnfold.healer.rows import build_rows
from turnfold.history.errors import RenderError
from turnfold.history.heal import plan_prompt
from turnfold.history.render import TemplateRenderer
from turnfold.history.session import Session
from turnfold.history.testing import ScriptedModel
from turnfold.schemas.events import HistoryMode, TurnCompleted
from turnfold.schemas.messages import ChatMessage, ToolCall
from turnfold.schemas.testing import finished, started
from turnfold.schemas.trajectories import Row
from turnfold.schemas.wire import Logprobs, TokenIds

REFERENCE_DRIVER = Path(__file__).parent / "history_reference" / "heal.py"
SIZES = [(1_000, 10), (10_000, 10), (10_000, 100), (100_000, 10), (100_000, 100), (100_000, 400)]
"""(tokens, messages) of a conversation at its end."""
MEASURED_TURNS = 4
DRIFTS = (0.0, 0.3, 1.0)
NUM_UPDATED_ROLLOUTS = 16
UPDATED_SIZE = (1_000, 18)
"""(tokens, messages) of a conversation that verl is updated with."""
SEED_FIGURES = {
    "sequences_saved_percent": 62.76,
    "tokens_saved_percent": 26.53,
    "actor_update_time_saved_percent": 18.24,
    "note": "published for another workload on GPUs; compare the direction, not the digits",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
            },
        },
    }
]
WORDS = ["the", "value", "index", "return", "list", "open", "read", "file", "path", "line", "error"]


class Step(NamedTuple):
    """A reply of the model, and what the agent adds after it."""

    reply: ChatMessage
    then: list[ChatMessage]


class Conversation(NamedTuple):
    opening: list[ChatMessage]
    steps: list[Step]
    tools: list[dict[str, Any]] | None


class Model:
    """Writes replies as its chat template does."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = {name: config[name] for name in ("bos_token", "eos_token") if config.get(name)}
        self.renderer = TemplateRenderer(
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            (folder / "chat_template.jinja").read_text(),
            special_tokens=named,
        )

    def sample(self, reply: ChatMessage, tools: Any, *, is_drifting: bool = False) -> list[int]:
        """The tokens of the reply; drifting, a tenth of its words comes in other tokens."""
        share = 0.1 if is_drifting else 0.0
        return ScriptedModel(self.renderer, split_share=share).sample(reply, tools)


class Rollout:
    """Plays a conversation in one history mode."""

    def __init__(self, model: Model, mode: HistoryMode) -> None:
        self.model, self.mode = model, mode
        self.session = Session("s", "r")
        self.events: list[TurnCompleted] = []
        self.cpu_ms: list[float] = []

    def turn(
        self, messages: Sequence[ChatMessage], tools: Any, output: list[int], reply: ChatMessage
    ) -> None:
        began = time.process_time()
        plan = plan_prompt(self.session, self.model.renderer, messages, tools, mode=self.mode)
        planned = time.process_time()
        event = TurnCompleted(
            rollout_id="r",
            event_id=f"e{len(self.events)}",
            session_id="s",
            turn_id=f"t{len(self.events)}",
            output_ids=TokenIds.of(output),
            logprobs=Logprobs.of([-0.5] * len(output)),
            reply=reply,
            **plan.event_fields(),
        )
        made = time.process_time()
        self.session.apply(event)
        self.cpu_ms.append((time.process_time() - made + planned - began) * 1e3)
        self.events.append(event)

    def rows(self) -> tuple[Row, ...]:
        state = open_rollout(started("r"), 0)
        for offset, event in enumerate([*self.events, finished("r")], start=1):
            state = fold(state, event, offset)
        return build_rows(resolve(state.turns.values()), self.mode)


def play(
    rollout: Rollout,
    conversation: Conversation,
    is_drifting: Callable[[], bool],
    on_turn: Callable[[list[ChatMessage], list[int], ChatMessage], None] = lambda *_: None,
) -> None:
    """Let the agent go through the conversation; the replies that drift come back otherwise."""
    said = list(conversation.opening)
    for reply, then in conversation.steps:
        is_drift = is_drifting()
        sent_back = reordered(reply) if is_drift else reply
        is_resampled = is_drift and sent_back is reply
        output = rollout.model.sample(reply, conversation.tools, is_drifting=is_resampled)
        on_turn(said, output, reply)
        rollout.turn(said, conversation.tools, output, reply)
        said = [*said, sent_back, *then]


def reordered(reply: ChatMessage) -> ChatMessage:
    """The reply with the keys of its arguments in another order; itself where that changes none."""
    if not any(isinstance(c.arguments, dict) and len(c.arguments) > 1 for c in reply.tool_calls):
        return reply
    calls = tuple(
        msgspec.structs.replace(call, arguments=dict(reversed(call.arguments.items())))
        if isinstance(call.arguments, dict)
        else call
        for call in reply.tool_calls
    )
    return msgspec.structs.replace(reply, tool_calls=calls)


def coding_agent(model: Model, num_tokens: int, num_messages: int, seed: int = 7) -> Conversation:
    """A tool loop of the given size: a call and its result, again and again."""
    rng = random.Random(seed)
    num_steps = max(1, (num_messages - 2) // 2)
    sample = " ".join(rng.choices(WORDS, k=1000))
    per_word = len(model.renderer.encode(sample)) / 1000
    call = ToolCall(name="run", arguments={"command": "make test", "timeout": 60}, id="call00001")
    reply = ChatMessage(role="assistant", content="I run it.", tool_calls=(call,))
    fixed = len(model.sample(reply, TOOLS)) + 20
    num_words = max(1, int((num_tokens / num_steps - fixed) / per_word))

    def result() -> ChatMessage:
        text = " ".join(rng.choices(WORDS, k=num_words))
        return ChatMessage(role="tool", content=text, tool_call_id=call.id, name="run")

    opening = [
        ChatMessage(role="system", content="You are a careful engineer."),
        ChatMessage(role="user", content="Find the bug."),
    ]
    return Conversation(opening, [Step(reply, [result()]) for _ in range(num_steps)], TOOLS)


def cpu_of_a_turn(
    model: Model, folder: Path, num_tokens: int, num_messages: int, reference: str | None
) -> dict[str, Any]:
    conversation = coding_agent(model, num_tokens, num_messages)
    # One step more, for the costs are those of a turn on the whole history.
    conversation = conversation._replace(steps=[*conversation.steps, conversation.steps[-1]])
    found: dict[str, Any] = {"cpu_ms": {}}
    turns: list[dict[str, Any]] = []

    def record(said: list[ChatMessage], output: list[int], reply: ChatMessage) -> None:
        turns.append(
            {"messages": [wire(m) for m in said], "output_ids": output, "reply": wire(reply)}
        )

    modes: tuple[HistoryMode, ...] = ("linear", "tree")
    for mode in modes:
        turns.clear()
        rollout = Rollout(model, mode)
        play(rollout, conversation, lambda: True, record)
        found["cpu_ms"][mode] = last_mean(rollout.cpu_ms)
        found["tokens"] = rollout.events[-1].num_prompt_tokens
        found["messages"] = len(turns[-1]["messages"])
        found[f"{mode}_continuity"] = rollout.events[-1].continuity
    if reference:
        asked = {"model": str(folder), "tools": TOOLS, "turns": turns}
        theirs = run_reference(reference, asked)
        found["reference_cpu_ms"] = {mode: last_mean(theirs[mode]) for mode in theirs}
    return found


def memory_of_a_session(model: Model, num_tokens: int, num_messages: int) -> dict[str, Any]:
    """Bytes that stay allocated after a conversation, its messages and caches included."""
    conversation = coding_agent(model, num_tokens, num_messages)
    found: dict[str, Any] = {"messages": num_messages}
    modes: tuple[HistoryMode, ...] = ("linear", "tree")
    for mode in modes:
        tracemalloc.start()
        rollout = Rollout(model, mode)
        play(rollout, conversation, lambda: True)
        found["tokens"] = rollout.events[-1].num_prompt_tokens
        rollout.events.clear()
        gc.collect()
        found[mode] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return found


def last_mean(cpu_ms: list[float]) -> float:
    return round(statistics.mean(cpu_ms[-MEASURED_TURNS:]), 2)


def wire(message: ChatMessage) -> dict[str, Any]:
    """The shape in which templates read a message."""
    form: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        form["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return form


def run_reference(python: str, conversation: dict[str, Any]) -> dict[str, list[float]]:
    done = subprocess.run(
        [python, str(REFERENCE_DRIVER)],
        input=json.dumps(conversation),
        capture_output=True,
        text=True,
        check=True,
    )
    measured: dict[str, list[float]] = json.loads(done.stdout)
    return measured


def recorded_conversations(folder: Path, limit: int) -> Iterator[Conversation]:
    """Conversations in files of JSON lines: {"messages": [OpenAI chat], "tools": [...]}."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            trace = json.loads(line)
            if number == limit or "messages" not in trace:
                break
            messages = list(read_messages(trace["messages"]))
            first = next((i for i, m in enumerate(messages) if m.role == "assistant"), None)
            if first:
                yield Conversation(messages[:first], steps(messages[first:]), trace["tools"])


def steps(messages: Sequence[ChatMessage]) -> list[Step]:
    found: list[Step] = []
    for message in messages:
        if message.role == "assistant":
            found.append(Step(message, []))
        else:
            found[-1].then.append(message)
    return found


def rows_of(
    model: Model, conversations: Sequence[Conversation], drift: float, mode: HistoryMode
) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for seed, conversation in enumerate(conversations):
        rollout, rng = Rollout(model, mode), random.Random(seed)
        try:
            play(rollout, conversation, lambda rng=rng: rng.random() < drift)  # type: ignore[misc]
        except RenderError:
            total["refused_by_the_template"] += 1
            continue
        rows = rollout.rows()
        total.update(
            conversations=1,
            turns=len(rollout.events),
            rows=len(rows),
            processed_tokens=sum(len(row.token_ids) for row in rows),
            sampled_tokens=sum(len(event.output_ids) for event in rollout.events),
        )
    return dict(total)


def rows_and_tokens(model: Model, conversations: Sequence[Conversation]) -> list[dict[str, Any]]:
    found = []
    for drift in DRIFTS:
        linear = rows_of(model, conversations, drift, "linear")
        tree = rows_of(model, conversations, drift, "tree")
        saved = {
            f"{name}_saved_percent": round(100 * (1 - linear[key] / tree[key]), 2)
            for name, key in (("sequences", "rows"), ("tokens", "processed_tokens"))
        }
        found.append({"drift": drift, "linear": linear, "tree": tree, **saved})
    return found


def actor_update(model: Model, folder: Path) -> dict[str, Any]:
    """Seconds that verl's actor update takes on the rows of the same rollouts, by history mode.

    What is saved is counted in CPU time, which a busy machine disturbs less.
    """
    from trainer import Bench  # the benchmark beside this one

    from turnfold.trainer.rows import TrainRow

    with redirect_stdout(sys.stderr):  # verl talks while it builds
        bench = Bench(folder)
        found: dict[str, Any] = {"drift": 0.3, "rollouts": NUM_UPDATED_ROLLOUTS}
        modes: tuple[HistoryMode, ...] = ("linear", "linear", "tree")  # the first one warms up
        for mode in modes:
            rows = []
            for seed in range(NUM_UPDATED_ROLLOUTS):
                rollout, rng = Rollout(model, mode), random.Random(seed)
                conversation = coding_agent(model, *UPDATED_SIZE, seed)
                play(rollout, conversation, lambda rng=rng: rng.random() < 0.3)  # type: ignore[misc]
                advantage = 1.0 if seed % 2 else -1.0
                rows += [
                    TrainRow(f"r{seed}", f"g{seed // 2}", row, advantage) for row in rollout.rows()
                ]
            began = time.process_time()
            found[mode] = bench.update(rows)
            found[mode]["update_cpu_s"] = round(time.process_time() - began, 3)
    saved = 1 - found["linear"]["update_cpu_s"] / found["tree"]["update_cpu_s"]
    return {**found, "actor_update_time_saved_percent": round(100 * saved, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory with tokenizer and chat template")
    parser.add_argument("--traces", type=Path, help="a folder of recorded conversations")
    parser.add_argument("--limit", type=int, default=10_000, help="conversations a file")
    parser.add_argument("--reference", help="a Python that has agentcore-rl-toolkit 0.2.0")
    parser.add_argument(
        "--update", action="store_true", help="time verl's update too; --model must hold weights"
    )
    parser.add_argument(
        "--skip", choices=["cpu", "rows"], nargs="+", default=[], help="leave a part out"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch)
        if args.model is None:
            build_tokenizer().save_pretrained(folder)
        model = Model(folder)
        result: dict[str, Any] = {"model": str(args.model or "tiny")}
        if "cpu" not in args.skip:
            cpu_of_a_turn(model, folder, 500, 6, None)  # imports, compiles, learns the template
            result["cpu"] = [cpu_of_a_turn(model, folder, *size, args.reference) for size in SIZES]
            result["memory"] = [memory_of_a_session(model, *size) for size in SIZES]
        if "rows" not in args.skip:
            conversations = (
                list(recorded_conversations(args.traces, args.limit))
                if args.traces
                else [coding_agent(model, 4_000, 22, seed) for seed in range(20)]
            )
            result["rows"] = rows_and_tokens(model, conversations)
            result["seed"] = SEED_FIGURES
        if args.update:
            result["actor_update"] = actor_update(model, folder)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
