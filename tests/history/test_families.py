"""Healing with the chat templates and tokenizers of real model families, on real conversations.

Skipped where those files are not beside the checkout. `make test-families` plays every template and
writes docs/families.md; the default run plays a few.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from turnfold.gateway.protocols.openai_messages import read_messages
from turnfold.history.encoding import encode_render
from turnfold.history.errors import RenderError
from turnfold.history.render import TemplateRenderer
from turnfold.history.render_memo import RenderMemo
from turnfold.history.saved_text import without_closing_marks
from turnfold.history.session import Session
from turnfold.history.template_facts import common_prefix, template_facts
from turnfold.history.testing import ScriptedModel
from turnfold.schemas.messages import ChatMessage, ToolCall

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "families.md"
TODAY = datetime.date(2026, 1, 2)

pytestmark = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir(), reason="no real tokenizers beside this checkout"
)


# Families


@dataclass(frozen=True)
class Family:
    """A chat template, with its own tokenizer where there is one."""

    name: str
    template: Path
    tokenizer: Path | None
    also: tuple[str, ...] = ()
    """Other names of the same template text."""

    def __str__(self) -> str:
        return self.name


TOKENIZERS_BY_NAME = {
    r"qwen3[-]?coder": "qwen3-coder",
    r"qwen3[._]?[568]\b|qwen3\.5|qwen3_[568]": "qwen3.5",
    r"qwen-?3(?!2b)": "qwen3",
    r"qwen-?qwen2\.5|qwen2_5": "qwen2.5",
    r"meta-llama|trl/llama3|lenml_llama3_1": "llama-3.1",
    r"devstral|mistral-small-3\.2": "devstral-2507",
    r"deepseek-v3\.1|trl/deepseekv3|lenml_deepseek_v3": "deepseek-v3.1",
    r"glm-4\.6|glm4moe": "glm-4.6",
    r"minimax-m2|minimax_m2": "minimax-m2",
    r"gpt-?oss": "gpt-oss",
}


@cache
def families() -> list[Family]:
    """The families with a tokenizer first, then every other template text once."""
    own = [
        Family(folder.name, folder / "chat_template.jinja", folder)
        for folder in sorted((SHARED / "tokenizers").iterdir())
        if (folder / "chat_template.jinja").is_file()
    ]
    others = [
        Family(f"{path.parent.name}/{path.stem}", path, tokenizer_of(path))
        for path in sorted((SHARED / "templates").glob("*/*.jinja"))
    ]
    by_text: dict[str, list[Family]] = defaultdict(list)
    for family in [*own, *others]:
        by_text[hashlib.sha256(family.template.read_bytes()).hexdigest()].append(family)
    return [
        Family(first.name, first.template, first.tokenizer, tuple(f.name for f in same))
        for first, *same in by_text.values()
    ]


def tokenizer_of(path: Path) -> Path | None:
    name = f"{path.parent.name}/{path.stem}".lower()
    found = (folder for pattern, folder in TOKENIZERS_BY_NAME.items() if re.search(pattern, name))
    folder = next(found, None)
    return SHARED / "tokenizers" / folder if folder else None


def real_families() -> list[Family]:
    return [family for family in families() if "/" not in family.name]


def named(*names: str) -> list[Family]:
    return [family for family in families() if family.name in names]


MARK = re.compile(
    r"<[|｜]?[/\w▁:.-]+(?: [\w▁]+)*[|｜]?>|\[/?[A-Z_]{3,}\]|<\|?/?[a-z_]+\|?>|\]<\][\w:]+\[>\["
)


@cache
def load(family: Family) -> TemplateRenderer:
    template = family.template.read_text(encoding="utf-8")
    if family.tokenizer is None:
        # No tokenizer of its own: a general one that knows the marks written in the template.
        tokenizer = Tokenizer.from_file(str(SHARED / "tokenizers" / "qwen2.5" / "tokenizer.json"))
        marks = sorted({*MARK.findall(template), "<s>", "</s>"})
        tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in marks])
        config = {"bos_token": "<s>", "eos_token": "</s>"}
    else:
        tokenizer = Tokenizer.from_file(str(family.tokenizer / "tokenizer.json"))
        config = json.loads((family.tokenizer / "tokenizer_config.json").read_text("utf-8"))
    named = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if config.get(key)}
    return TemplateRenderer(tokenizer, template, special_tokens=named, today=TODAY)


# Conversations


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str, *calls: ToolCall, reasoning: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def tool(text: str, call: ToolCall) -> ChatMessage:
    return ChatMessage(role="tool", content=text, tool_call_id=call.id, name=call.name)


WEATHER = ToolCall(name="get_weather", arguments={"city": "Zürich", "n": 2}, id="callabc01")
RUN = ToolCall(
    name="run",
    arguments={"cmd": 'ls -la\necho "hi"', "opts": {"b": 1, "a": [1, 2]}},
    id="callabc02",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Calls {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": key} for key, kind in properties.items()
                },
                "required": list(properties),
            },
        },
    }
    for name, properties in {
        "get_weather": {"city": "string", "n": "integer"},
        "run": {"cmd": "string", "opts": "object"},
    }.items()
]
HEAD = [system("You are helpful."), user("How is the weather?")]
TEXT = [
    *HEAD,
    assistant("Hello there, friend"),
    user("bye"),
    assistant("Ciao bello"),
    user("so"),
    assistant("Done"),
]
SPACED = [
    *HEAD,
    assistant(" Hello there, friend\n"),
    user("bye"),
    assistant("Ciao bello \n"),
    user("so"),
    assistant("Done"),
]
ONE_CALL = [
    *HEAD,
    assistant("", WEATHER),
    tool("sunny", WEATHER),
    assistant("It is sunny."),
    user("and?"),
    assistant("Done"),
]
TEXT_AND_CALL = [
    *HEAD,
    assistant("Let me look.", WEATHER),
    tool("sunny", WEATHER),
    assistant("", RUN),
    tool("a b", RUN),
    assistant("Done"),
]
PARALLEL = [
    *HEAD,
    assistant("", WEATHER, RUN),
    tool("sunny", WEATHER),
    tool("a\nb", RUN),
    assistant("It is sunny."),
    user("thanks"),
    assistant("Gladly"),
]
THINKING_LOOP = [
    *HEAD,
    assistant("", WEATHER, reasoning="I need to look"),
    tool("sunny", WEATHER),
    assistant("Sunny.", reasoning="Now I know"),
]
THINKING_CHAT = [
    *HEAD,
    assistant("Hello", reasoning="I greet"),
    user("bye"),
    assistant("Ciao", reasoning="I part"),
    user("so"),
    assistant("Done", reasoning="I am done"),
]
THINKING_ALL = [
    *HEAD,
    assistant("", WEATHER, reasoning="I need to look"),
    tool("sunny", WEATHER),
    assistant("Sunny.", reasoning="Now I know"),
    user("thanks"),
    assistant("Gladly", reasoning="I am polite"),
]

Client = Callable[[ChatMessage], ChatMessage]
"""What an agent sends back of a reply."""


def faithful(reply: ChatMessage) -> ChatMessage:
    return reply


def without_reasoning(reply: ChatMessage) -> ChatMessage:
    return msgspec.structs.replace(reply, reasoning="")


def without_call_text(reply: ChatMessage) -> ChatMessage:
    return msgspec.structs.replace(reply, content="") if reply.tool_calls else reply


def stripped(reply: ChatMessage) -> ChatMessage:
    return msgspec.structs.replace(reply, content=reply.content.strip())


def reordered(reply: ChatMessage) -> ChatMessage:
    calls = tuple(
        msgspec.structs.replace(call, arguments=dict(reversed(call.arguments.items())), id="other")
        for call in reply.tool_calls
    )
    return msgspec.structs.replace(reply, tool_calls=calls)


@dataclass(frozen=True)
class Scenario:
    """A conversation of a model with an agent that handles its replies in some way."""

    name: str
    messages: list[ChatMessage]
    client: Client = faithful
    is_stop_kept: bool = True
    split_share: float = 0.0
    kind: str = "one agent"
    """or `retry`, which asks for the last reply twice, or `two agents` that take turns."""

    def __str__(self) -> str:
        return self.name


SCENARIOS = [
    Scenario("text", TEXT),
    Scenario("call", ONE_CALL),
    Scenario("text and call", TEXT_AND_CALL),
    Scenario("parallel calls", PARALLEL),
    Scenario("thinking in a tool loop", THINKING_LOOP),
    Scenario("thinking over user turns", THINKING_CHAT),
    Scenario("thinking and calls over user turns", THINKING_ALL),
    Scenario("stop token trimmed", TEXT_AND_CALL, is_stop_kept=False),
    Scenario("other tokens sampled", TEXT_AND_CALL, split_share=0.5),
    Scenario("client drops reasoning", THINKING_ALL, without_reasoning),
    Scenario("client reorders arguments", TEXT_AND_CALL, reordered),
    Scenario("client strips text", SPACED, stripped),
    Scenario("client drops text beside a call", TEXT_AND_CALL, without_call_text),
    Scenario("client retries", ONE_CALL, kind="retry"),
    Scenario("two agents under one key", ONE_CALL, kind="two agents"),
]


# Playing


LETTERS = {"template_rewrote_history": "t", "reply_reformatted": "f", "retokenized": "r"}
"""How the table tells why turns were healed; `c` is what the client changed."""


@dataclass
class Outcome:
    """What became of the turns of a scenario that had a past."""

    continuities: Counter[str] = field(default_factory=Counter)
    causes: set[str] = field(default_factory=set)
    kept: list[str] = field(default_factory=list)
    """For each turn that kept what the template took back: what it showed, and what it shows now."""
    is_refused: bool = False

    @property
    def kind(self) -> str:
        if self.is_refused:
            return "refused"
        return "reset" if "reset" in self.continuities else "healed" if self.causes else "="

    @property
    def cell(self) -> str:
        """How the table shows the outcome."""
        match self.kind:
            case "refused":
                return "–"
            case "reset":
                return f"reset {self.continuities['reset']}"
            case _:
                return "".join(sorted({LETTERS.get(cause, "c") for cause in self.causes})) or "="


def play(
    chat: Any,
    model: ScriptedModel,
    messages: Sequence[ChatMessage],
    tools: Any,
    client: Client = faithful,
    is_last_retried: bool = False,
) -> Outcome:
    """Play a conversation and check every turn of it; `outcome` says how it went."""
    outcome, parent = Outcome(), None
    for said, reply, next_role in requests(messages, client):
        ids = model.sample(reply, tools, next_role)
        plan = chat.turn(said, ids, reply, tools)
        if parent is not None:
            check(chat, plan, parent, said, tools, outcome)
        if is_last_retried and reply is messages[-1]:
            again = chat.turn(said, ids, reply, tools)
            assert again.prompt_ids.tolist() == plan.prompt_ids.tolist()
            assert (again.continuity, again.num_renders) == ("forked", 0)
        parent = chat.session.last_turn_id
    return outcome


def play_two(chat: Any, model: ScriptedModel, messages: Sequence[ChatMessage]) -> Outcome:
    """Two agents with other tasks and the same words take turns under one key."""
    outcome = Outcome()
    agents = [
        list(requests([system(task), *messages[1:]], faithful)) for task in ("Agent 1", "Agent 2")
    ]
    parents: list[str | None] = [None, None]
    for turn in zip(*agents, strict=True):
        for agent, (said, reply, next_role) in enumerate(turn):
            plan = chat.turn(said, model.sample(reply, TOOLS, next_role), reply, TOOLS)
            if parents[agent] is not None:
                check(chat, plan, parents[agent], said, TOOLS, outcome)
            parents[agent] = chat.session.last_turn_id
    return outcome


def requests(
    messages: Sequence[ChatMessage], client: Client
) -> Iterator[tuple[list[ChatMessage], ChatMessage, str]]:
    """For each reply: the messages that ask for it, the reply, and who speaks after it."""
    said: list[ChatMessage] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            after = messages[index + 1].role if index + 1 < len(messages) else "user"
            if said:  # a recording may begin with a reply, to a request that it does not hold
                yield list(said), message, after
            said.append(client(message))
        else:
            said.append(message)


def check(
    chat: Any, plan: Any, parent: str, said: Sequence[ChatMessage], tools: Any, outcome: Outcome
) -> None:
    """The prompt repeats the saved ids and reads as the template shows the stored history."""
    outcome.continuities[plan.continuity] += 1
    sequences, renderer = chat.session.sequences, chat.renderer
    if plan.divergence is not None:
        outcome.causes.add(plan.divergence.cause)
    assert plan.continuity in ("extended", "healed"), plan.divergence
    assert (plan.parent_turn_id, plan.shared_len) == (parent, sequences.length(parent))
    saved = sequences.full(parent)
    assert plan.prompt_ids[: len(saved)].tolist() == saved.tolist()
    stored = [*chat.session.history(parent), *said[plan.shared_messages :]]
    shown = renderer.render(stored, tools, True)
    if shown.startswith(renderer.decode(saved)):
        text = renderer.decode(plan.prompt_ids)
        # A tokenizer that lacks a character of the text loses it whoever encodes it.
        assert text == shown or text == renderer.decode(renderer.encode(shown))
        assert plan.num_renders <= 2
    else:
        assert plan.divergence is not None
        assert plan.divergence.token_index < len(saved)
        taken_back = what_was_taken_back(chat, parent, shown)
        if taken_back is not None:
            outcome.kept.append(taken_back)
        tail = renderer.decode(plan.prompt_tail.array)
        bare = without_call_text(stored[plan.shared_messages - 1])
        stored[plan.shared_messages - 1] = bare
        # What the model wrote beside a call is not said again where a template shows it later.
        assert shown.endswith(tail) or renderer.render(stored, tools, True).endswith(tail)


def what_was_taken_back(chat: Any, parent: str, shown: str) -> str | None:
    """What stood before the model and is shown no more, whitespace aside; None where all is shown."""
    renderer, sequences = chat.renderer, chat.session.sequences
    shown = "".join(shown.split())
    ids, at = sequences.full(parent), 0
    for span in sequences.spans(parent):
        if span.is_output:
            continue
        asked = renderer.decode(ids[span.start : span.stop])
        asked = asked.removesuffix(template_facts(renderer).opening)
        asked = "".join(without_closing_marks(renderer, asked).split())
        found = shown.find(asked, at)
        if found < 0 or (span.start == 0 and found > 0):
            common = len(common_prefix(asked, shown[at:]))
            return f"{snippet(asked, common)} → {snippet(shown[at:], common)}"
        at = found + len(asked)
    return None


def snippet(text: str, at: int) -> str:
    return f"`{text[max(0, at - 24) : at + 24]}`".replace("|", "¦")


def play_scenario(family: Family, scenario: Scenario, converse: Any) -> Outcome:
    renderer = load(family)
    chat = converse(renderer)
    model = ScriptedModel(
        renderer, is_stop_kept=scenario.is_stop_kept, split_share=scenario.split_share
    )
    is_retried = scenario.kind == "retry"
    try:
        if scenario.kind == "two agents":
            outcome = play_two(chat, model, scenario.messages)
        else:
            outcome = play(chat, model, scenario.messages, TOOLS, scenario.client, is_retried)
    except RenderError:
        return Outcome(is_refused=True)
    num_branches = 1 if scenario.kind == "one agent" else 2
    assert len(chat.rows()) == num_branches
    return outcome


def conversations(limit: int, max_messages: int) -> Iterator[tuple[list[ChatMessage], Any]]:
    """Recorded conversations, so many of each collection."""
    for path in sorted((SHARED / "traces").glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines[:limit]:
            trace = json.loads(line)
            if "messages" in trace:
                messages = read_messages(
                    msgspec.Raw(msgspec.json.encode(message))
                    for message in trace["messages"][:max_messages]
                )
                yield list(messages), trace["tools"] or None


@dataclass
class Replay:
    """How many recorded conversations were played, and how many of them are one row."""

    num_played: int = 0
    num_whole: int = 0

    @property
    def cell(self) -> str:
        return f"{self.num_whole}/{self.num_played}" if self.num_played else "–"


def replay(
    family: Family, converse: Any, limit: int, max_messages: int, split_share: float = 0.1
) -> Replay:
    renderer, found = load(family), Replay()
    for messages, tools in conversations(limit, max_messages):
        chat = converse(renderer)
        try:
            play(chat, ScriptedModel(renderer, split_share=split_share), messages, tools)
        except RenderError:
            continue  # the template does not take this conversation at all
        found.num_played += 1
        found.num_whole += len(chat.rows()) <= 1
    return found


# The default run: families that differ most


FEW = ["deepseek-v3.1", "glm-4.6", "gpt-oss", "llama-3.1", "qwen3", "qwen3-coder"]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_scenario_is_one_row_in_families_that_differ_most(
    name: str, scenario: Scenario, converse: Any
) -> None:
    [family] = named(name)
    outcome = play_scenario(family, scenario, converse)
    is_parallel_llama = name == "llama-3.1" and scenario.name == "parallel calls"
    assert outcome.is_refused == is_parallel_llama


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-coder"])
def test_a_few_recorded_conversations_are_one_row(name: str, converse: Any) -> None:
    [family] = named(name)
    found = replay(family, converse, limit=2, max_messages=12)
    assert found.num_whole == found.num_played > 5


@pytest.mark.parametrize("name", FEW)
def test_real_prompts_encode_in_parts_as_the_whole(name: str) -> None:
    [family] = named(name)
    renderer, session = load(family), Session("s1")
    assert template_facts(renderer).cuts is not None
    for messages, tools in conversations(limit=1, max_messages=10):
        try:
            render = renderer.render(messages, tools, True)
        except RenderError:
            continue
        assert encode_render(session, renderer, render).tolist() == renderer.encode(render).tolist()


@pytest.mark.parametrize("name", FEW)
def test_a_remembered_render_is_the_render(name: str) -> None:
    check_remembered_renders(*named(name))


def check_remembered_renders(family: Family) -> None:
    """All scenarios in one memo, message by message, now and then with another past."""
    renderer, memo = load(family), RenderMemo()
    before: list[ChatMessage] = []
    for scenario in SCENARIOS:
        for end in range(1, len(scenario.messages) + 1):
            for messages in (scenario.messages[:end], [*before, *scenario.messages[:end]]):
                for tools in (TOOLS, None):
                    plain = rendered(renderer, messages, tools)
                    assert rendered(renderer, messages, tools, memo) == plain
        before = scenario.messages[: len(scenario.messages) // 2 * 2]


def rendered(
    renderer: TemplateRenderer,
    messages: Sequence[ChatMessage],
    tools: Any,
    memo: RenderMemo | None = None,
) -> str:
    try:
        return renderer.render(messages, tools, True, memo)
    except RenderError as error:
        return f"refused: {error}"


def test_gpt_oss_closes_each_kind_of_reply_with_its_own_mark(converse: Any) -> None:
    renderer = load(*named("gpt-oss"))
    for is_stop_kept, closed in (
        (True, "<|return|><|start|>user"),
        (False, "<|end|><|start|>user"),
    ):
        chat = converse(renderer)
        play(chat, ScriptedModel(renderer, is_stop_kept=is_stop_kept), ONE_CALL, TOOLS)
        text = renderer.decode(chat.session.sequences.full("t2"))
        assert '"n": 2}<|call|><|start|>functions.get_weather to=assistant' in text
        assert "It is sunny." + closed in text


@pytest.mark.parametrize("name", ["qwen3-coder", "qwen3.5", "glm-4.6", "minimax-m2", "qwen2.5"])
@pytest.mark.parametrize("is_stop_kept", [True, False], ids=["stop kept", "stop trimmed"])
def test_line_break_after_a_call_does_not_close_it_twice(
    name: str, is_stop_kept: bool, converse: Any
) -> None:
    renderer = load(*named(name))
    chat = converse(renderer)
    said, reply = ONE_CALL[:2], ONE_CALL[2]
    ids = ScriptedModel(renderer, is_stop_kept=is_stop_kept).sample(reply, TOOLS, "tool")
    end = len(ids) - 1 if is_stop_kept else len(ids)
    written = [*ids[:end], *renderer.encode("\n").tolist(), *ids[end:]]
    chat.turn(said, written, reply, TOOLS)
    plan = chat.plan([*said, reply, ONE_CALL[3]], TOOLS)
    asked = chat.session.sequences.prompt_length("t0")
    clean = converse(renderer)
    clean.turn(said, ids, reply, TOOLS)
    expected = clean.plan([*said, reply, ONE_CALL[3]], TOOLS).prompt_ids.tolist()
    assert plan.prompt_ids.tolist() == [*expected[:asked], *written, *expected[asked + len(ids) :]]


# Every template, and the published table


@dataclass
class Table:
    """What docs/families.md shows, collected over the tests of a run."""

    outcomes: dict[Family, list[Outcome]] = field(default_factory=dict)
    replays: dict[Family, Replay] = field(default_factory=dict)

    def text(self) -> str:
        real = [f for f in self.outcomes if f.tokenizer is not None]
        others = [f for f in self.outcomes if f.tokenizer is None]
        return "\n".join(
            [
                *INTRODUCTION,
                *(f"{number}. {scenario}" for number, scenario in enumerate(SCENARIOS, start=1)),
                "",
                *self.summary(),
                "",
                "## Templates with their own tokenizer",
                "",
                *self.rows(real),
                "",
                "## Templates with a stand-in tokenizer",
                "",
                *self.rows(others),
                "",
                "## What templates take back, and the model keeps",
                "",
                *TAKEN_BACK,
                "",
                *self.kept(),
                "",
            ]
        )

    def summary(self) -> list[str]:
        cells = Counter(o.kind for found in self.outcomes.values() for o in found)
        played = sum(replay.num_played for replay in self.replays.values())
        whole = sum(replay.num_whole for replay in self.replays.values())
        return [
            f"{len(self.outcomes)} templates, {sum(cells.values())} cells: {cells['=']} as they "
            f"stand, {cells['healed']} healed, {cells['reset']} with resets, {cells['refused']} refused "
            f"by the template. {whole} of {played} recorded conversations are one row.",
        ]

    def rows(self, found: Sequence[Family]) -> list[str]:
        numbers = [str(number) for number in range(1, len(SCENARIOS) + 1)]
        lines = [
            f"| template | {' | '.join(numbers)} | recorded |",
            f"|---|{'---|' * (len(numbers) + 1)}",
        ]
        return lines + [self.row(family) for family in found]

    def row(self, family: Family) -> str:
        cells = [outcome.cell for outcome in self.outcomes[family]]
        replayed = self.replays[family].cell if family in self.replays else "–"
        also = f" (= {', '.join(family.also)})" if family.also else ""
        return f"| {family.name}{also} | {' | '.join(cells)} | {replayed} |"

    def kept(self) -> list[str]:
        lines = ["| template | scenarios | was → is |", "|---|---|---|"]
        for family, outcomes in self.outcomes.items():
            numbers = [str(n) for n, o in enumerate(outcomes, start=1) if o.kept]
            first = next((o.kept[0] for o in outcomes if o.kept), None)
            if first is not None:
                lines.append(f"| {family.name} | {', '.join(numbers)} | {first} |")
        return lines


INTRODUCTION = [
    "# Healing by model family",
    "",
    "Written by `make test-families`, which plays every chat template it finds through every",
    "scenario in linear mode and checks each turn: the prompt begins with the exact saved ids, it",
    "reads as the template's own render of the same history wherever the model's text was what the",
    "template shows, and an uninterrupted conversation is one training row.",
    "",
    "| cell | meaning |",
    "|---|---|",
    "| = | every turn extends the one before as it stands |",
    "| letters | one row; turns were healed, and this is why: |",
    "| t | the template shows something earlier differently now |",
    "| f | the template writes the reply otherwise than the model did |",
    "| r | the model sampled other tokens than its text encodes to |",
    "| c | the client wrote the reply otherwise, or left a part out |",
    "| reset n | n turns began a new row |",
    "| – | the template refuses the conversation |",
    "",
    "`recorded` counts recorded conversations of public agents that are one row, of those that the",
    "template takes; the model samples a tenth of its words in other tokens. A template without its",
    "own tokenizer is played with another one that knows the marks written in the template.",
    "",
    "The scenarios:",
    "",
]


TAKEN_BACK = [
    "Text that was put before the model (system, tools, user, tool results; not its own reasoning)",
    "and that the template does not show any more, or shows elsewhere. The saved tokens stay, and",
    "the turn says `template_rewrote_history`.",
]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Collects what the tests find; the file named by FAMILIES_TABLE gets it all in the end."""
    found = Table()
    yield found
    path = os.environ.get("FAMILIES_TABLE")
    if path and found.outcomes:
        Path(path).write_text(found.text(), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", families() if (SHARED / "tokenizers").is_dir() else [], ids=str)
def test_every_template_heals_or_says_what_it_rewrote(
    family: Family, converse: Any, table: Table
) -> None:
    check_remembered_renders(family)
    table.outcomes[family] = [play_scenario(family, s, converse) for s in SCENARIOS]
    is_own = "/" not in family.name
    limit, max_messages = (1000, 30) if is_own else (2, 12)
    table.replays[family] = replay(family, converse, limit, max_messages)


@pytest.mark.parametrize("name", ["gpt-oss", "llamacpp/Mistral-Small-3.2-24B-Instruct-2506"])
def test_published_table_says_what_happens(name: str, converse: Any) -> None:
    [family] = named(name)
    outcomes = [play_scenario(family, scenario, converse) for scenario in SCENARIOS]
    row = Table({family: outcomes}).row(family).rpartition(" | ")[0]
    assert any(line.startswith(row) for line in PUBLISHED.read_text("utf-8").splitlines()), row
