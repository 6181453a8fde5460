"""A reply that is read while it is sampled is the one that is read at once."""

import math
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.gateway.backends.engine import Generation
from turnfold.gateway.calls import Answer, AnswerPiece, ModelCall
from turnfold.gateway.parsing.detection import FORMATS
from turnfold.gateway.parsing.replies import Situation, reply_of
from turnfold.gateway.parsing.spans import num_reasoning_tokens
from turnfold.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from turnfold.gateway.protocols.anthropic_content import read_conversation
from turnfold.gateway.protocols.openai_items import read_input
from turnfold.gateway.protocols.protocol import ModelProtocol
from turnfold.gateway.turns.sampling.reply import LiveReply, merged, token_logprobs
from turnfold.gateway.turns.steps import reply_message, sampled_text
from turnfold.schemas.messages import ChatMessage, Tool
from turnfold.schemas.wire import Logprobs, TokenIds

TURN = "0123456789abcdef" * 2

TOOLS: tuple[Tool, ...] = (
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}},
    },
)

COMMON = ["a", " b", "\n", "\n\n", "<", "{", "}", '"', "é", "😀", "<think>", "</think>", "hm. "]

FRAGMENTS = {
    "qwen": [
        '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
        '<tool_call>{"name": "f", "arg</tool_call>',
        "<tool_call>",
    ],
    "qwen_coder": [
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        "<function=f>",
        "</tool_call>",
    ],
    "glm": [
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call>f<arg_key>",
    ],
    "minimax": [
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call><invoke name="f">',
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
    ],
    "mistral": ["[TOOL_CALLS]f[ARGS]{}", '[TOOL_CALLS][{"name": "f"}]', "[THINK]", "[/THINK]"],
    "llama": ['{"name": "f", "parameters": {"n": 1}}', "<|python_tag|>", '{"name": "x"}', "; "],
    "gpt_oss": [
        "<|channel|>analysis<|message|>hm<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        "<|start|>assistant<|channel|>commentary<|message|>so<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>why<|end|>",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    ],
    "reasoning": ["<tool_call>"],
    "plain": ["<tool_call>"],
}


class Bytes:
    """A byte is a token; from 256 on come added tokens."""

    ADDED = ("<|end|>", "<tool_call>", "</tool_call>", "<|channel|>", "</think>")

    special_ids = frozenset(range(256, 256 + len(ADDED)))
    boundaries = frozenset[str]()

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
    ) -> str:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        data = b"".join(
            self.ADDED[i - 256].encode() if i > 255 else bytes([i]) for i in map(int, ids)
        )
        return data.decode(errors="replace")

    def encode(self, text: str) -> Any:
        ids: list[int] = []
        while text:
            added = next((a for a in self.ADDED if text.startswith(a)), None)
            head = added or text[0]
            ids += [256 + self.ADDED.index(added)] if added else list(head.encode())
            text = text[len(head) :]
        return np.array(ids, np.uint32)


RENDERER = Bytes()
END = 256


class Sampled(msgspec.Struct):
    """A sample and how it came."""

    generation: Generation
    bounds: list[int]
    situation: Situation
    stops: tuple[str, ...]
    num_untold: int
    has_told_logprobs: bool


@st.composite
def samples(draw: st.DrawFn, name: str) -> Sampled:
    texts = st.lists(st.sampled_from(COMMON + FRAGMENTS[name]), max_size=14)
    ids = RENDERER.encode("".join(draw(texts))).tolist() or [97]
    stops = draw(st.lists(st.sampled_from(["b", "\n\n", "}}", "</think>", "é"]), max_size=2))
    ending = draw(st.sampled_from(["length", "token", "string"]))
    finish: Literal["stop", "length"] = "length" if ending == "length" else "stop"
    stop_reason = None
    if ending == "string" and stops:
        stop_reason = draw(st.sampled_from(stops))
    elif ending != "length":
        ids.append(END)
    logprobs = [-0.1 * (i + 1) for i in range(len(ids))]
    cuts = draw(st.lists(st.integers(1, len(ids)), max_size=8)) or list(range(len(ids)))
    return Sampled(
        generation=Generation(
            output_ids=TokenIds.of(ids),
            logprobs=Logprobs.of(logprobs),
            finish_reason=finish,
            stop_reason=stop_reason,
        ),
        bounds=sorted({0, len(ids), *cuts}),
        situation=Situation(
            is_calling_allowed=draw(st.booleans()),
            is_reasoning_open=draw(st.booleans()),
            tools=TOOLS,
        ),
        stops=tuple(stops),
        num_untold=draw(st.integers(0, 2)),
        has_told_logprobs=draw(st.booleans()),
    )


def read_live(name: str, sampled: Sampled) -> tuple[LiveReply, list[AnswerPiece]]:
    reply = LiveReply(
        RENDERER,
        FORMATS[name].begin(sampled.situation),
        stops=sampled.stops,
        turn_id=TURN,
        has_logprobs=True,
    )
    ids, logprobs = sampled.generation.output_ids.tolist(), sampled.generation.logprobs.tolist()
    told: list[AnswerPiece] = []
    for start, end in list(pairwise(sampled.bounds))[: -sampled.num_untold or None]:
        given = logprobs[start:end] if sampled.has_told_logprobs else ()
        told += reply.feed(ids[start:end], given)
    return reply, [*told, *reply.end(sampled.generation)]


def answer_of(name: str, sampled: Sampled) -> Answer:
    """What a call that is not streamed gets."""
    situation = sampled.situation
    parser = FORMATS[name].begin(situation)
    parts = [*parser.feed(sampled_text(sampled.generation, RENDERER)), *parser.end()]
    parsed = reply_of(parts)
    ids, logprobs = sampled.generation.output_ids.tolist(), sampled.generation.logprobs.tolist()
    return Answer(
        turn_id=TURN,
        created=1,
        model="m",
        num_prompt_tokens=3,
        reply=reply_message(parsed, TURN),
        finish_reason=sampled.generation.finish_reason,
        stop_reason=sampled.generation.stop_reason,
        num_output_tokens=len(ids),
        num_reasoning_tokens=num_reasoning_tokens(
            parts, sampled.generation.output_ids.array, RENDERER.decode
        ),
        logprobs=tuple(token_logprobs(ids, logprobs, RENDERER)),
    )


def streamed(
    protocol: ModelProtocol, answer: Answer, pieces: list[AnswerPiece], call: ModelCall
) -> list[dict[str, Any]]:
    stream = protocol.begin_stream(answer, call)
    events = list(stream.begin())
    for piece in pieces:
        events += stream.add(piece)
    events += stream.end(answer)
    lines = [line for event in events for line in event.decode().split("\n")]
    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [msgspec.json.decode(data) for data in datas if data != "[DONE]"]


def call_for(name: str, **fields: Any) -> ModelCall:
    return ModelCall(protocol=name, model="m", messages=(), is_streamed=True, **fields)


@pytest.mark.field_case("vllm#27482")
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_reply_read_in_pieces_is_the_reply_read_at_once(name: str, data: st.DataObject) -> None:
    sampled = data.draw(samples(name))
    reply, pieces = read_live(name, sampled)
    answer = answer_of(name, sampled)
    assert reply_message(reply.parsed, TURN) == answer.reply
    assert reply.parsed.num_reasoning_tokens == answer.num_reasoning_tokens
    assert "".join(piece.reasoning for piece in pieces) == answer.reply.reasoning
    assert "".join(piece.content for piece in pieces) == answer.reply.content
    calls = [piece.tool_call for piece in pieces if piece.tool_call is not None]
    assert tuple(calls) == answer.reply.tool_calls
    assert tuple(token for piece in pieces for token in piece.logprobs) == answer.logprobs


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_chat_chunks_put_together_are_the_plain_message(name: str, data: st.DataObject) -> None:
    sampled = data.draw(samples(name))
    answer, (_, pieces) = answer_of(name, sampled), read_live(name, sampled)
    call = call_for("openai_chat", is_usage_streamed=True, has_logprobs=True)
    plain = msgspec.json.decode(openai_chat.answer_body(answer, call))
    (choice,) = plain["choices"]
    for told in (pieces, merged(pieces)):
        *chunks, last, usage = streamed(openai_chat, answer, told, call)
        choices = [chunk["choices"][0] for chunk in (*chunks, last)]
        deltas = [c["delta"] for c in choices]
        assert "".join(d.get("content") or "" for d in deltas) == (
            choice["message"]["content"] or ""
        )
        assert "".join(d.get("reasoning_content", "") for d in deltas) == choice["message"].get(
            "reasoning_content", ""
        )
        assert accumulated_calls(deltas) == choice["message"].get("tool_calls", [])
        logprobs = [t for c in choices for t in (c["logprobs"] or {"content": []})["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * len(chunks)
        assert choices[-1]["finish_reason"] == choice["finish_reason"]
        assert (usage["choices"], usage["usage"]) == ([], plain["usage"])


def accumulated_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", [])):
        if part["index"] == len(calls):
            calls.append({"id": part["id"], "type": "function", "function": part["function"]})
        else:
            assert part["index"] == len(calls) - 1
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Anthropic's blocks as an SDK puts them together."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                kind = delta.pop("type")
                if kind == "input_json_delta":
                    blocks[-1]["input"] = msgspec.json.decode(delta["partial_json"])
                for field in ("text", "thinking", "signature"):
                    if field in delta:
                        blocks[-1][field] += delta[field]
            case "content_block_stop":
                assert is_open
                is_open = False
    assert not is_open
    return blocks


@pytest.mark.field_case("claude-code#16785")
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), is_hidden=st.booleans())
def test_anthropic_events_put_together_are_the_plain_message(
    name: str, data: st.DataObject, is_hidden: bool
) -> None:
    sampled = data.draw(samples(name))
    answer, (_, pieces) = answer_of(name, sampled), read_live(name, sampled)
    call = call_for("anthropic_messages", is_reasoning_hidden=is_hidden)
    plain = msgspec.json.decode(anthropic_messages.answer_body(answer, call))
    for told in (pieces, merged(pieces)):
        events = streamed(anthropic_messages, answer, told, call)
        blocks = blocks_of(events)
        for kind, field in (("text", "text"), ("thinking", "thinking")):
            assert joined(blocks, kind, field) == joined(plain["content"], kind, field)
        assert of_kind(blocks, "tool_use") == of_kind(plain["content"], "tool_use")
        assert [e["type"] for e in events[:2]] == ["message_start", "ping"]
        assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
        ending = {name: plain[name] for name in ("stop_reason", "stop_sequence")}
        assert events[-2]["delta"] == ending
        assert ending["stop_reason"]
        assert events[-2]["usage"] == plain["usage"]
        assert said_again(read_conversation(None, [user(), assistant(blocks)])) == said(answer)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_responses_events_put_together_are_the_plain_response(
    name: str, data: st.DataObject
) -> None:
    sampled = data.draw(samples(name))
    answer, (_, pieces) = answer_of(name, sampled), read_live(name, sampled)
    call = call_for("openai_responses", has_logprobs=True, is_reasoning_sealed=True)
    plain = msgspec.json.decode(openai_responses.answer_body(answer, call))
    for told in (pieces, merged(pieces)):
        events = streamed(openai_responses, answer, told, call)
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        last = events[-1]["response"]
        output = last.pop("output")
        assert last == {field: plain[field] for field in last}
        assert output == items_of(events)
        for kind in ("reasoning", "message"):
            assert item_text(output, kind) == item_text(plain["output"], kind)
        assert of_kind(output, "function_call") == of_kind(plain["output"], "function_call")
        assert said_again(read_input([user(), *output]).messages) == said(answer)
        # A reply that thinks after it has spoken is told in that order, and shown in the usual one.
        if [item["type"] for item in output] == [item["type"] for item in plain["output"]]:
            assert output == plain["output"]


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that were told as done; what was told of each before agrees with it."""
    items: list[dict[str, Any]] = []
    text, is_open = "", False
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            text, is_open = "", True
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "output_item.done":
            item, is_open = event["item"], False
            assert event["output_index"] == len(items)
            whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]
            assert (whole if isinstance(whole, str) else whole["text"]) == text
            items.append(item)
    return items


def joined(blocks: list[dict[str, Any]], kind: str, field: str) -> str:
    return "".join(block[field] for block in of_kind(blocks, kind))


def of_kind(blocks: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [block for block in blocks if block["type"] == kind]


def item_text(items: list[dict[str, Any]], kind: str) -> str:
    return "".join(item["content"][0]["text"] for item in of_kind(items, kind))


def user() -> dict[str, Any]:
    return {"role": "user", "content": "u"}


def assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": blocks}


def said(answer: Answer) -> ChatMessage:
    return answer.reply


def said_again(messages: tuple[ChatMessage, ...]) -> ChatMessage:
    """The reply as it comes back in the history of a client that keeps what it got."""
    _, reply = messages
    return reply


def feed_all(name: str, text: str, **fields: Any) -> list[AnswerPiece]:
    """What is shown after each token of the text."""
    reply = LiveReply(
        RENDERER,
        FORMATS[name].begin(Situation(tools=TOOLS)),
        stops=fields.get("stops", ()),
        turn_id=TURN,
        has_logprobs=False,
    )
    return [piece for i in RENDERER.encode(text).tolist() for piece in reply.feed([i])]


def test_text_is_shown_token_by_token() -> None:
    assert [piece.content for piece in feed_all("qwen", "It is é")] == list("It is é")


def test_an_added_token_waits_for_the_one_after_it() -> None:
    assert feed_all("plain", "a<|end|>") == [AnswerPiece(content="a")]
    assert [p.content for p in feed_all("plain", "a<|end|>b")] == ["a", "<|end|>b"]


def test_a_call_in_bare_json_is_held_back_until_it_is_decided() -> None:
    assert feed_all("llama", '{"name": "f", "parameters": {}') == []
    (made,) = feed_all("llama", '{"name": "f", "parameters": {}}')
    assert made.tool_call is not None
    assert made.tool_call.id == f"call_{TURN[:22]}00"
    (shown, *_) = feed_all("llama", '{"a": 1}')
    assert shown.content.startswith("{")


def test_a_malformed_call_is_shown_as_text_once_it_is_known_to_be_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": }</tool_call>'
    assert "".join(p.content for p in feed_all("qwen", text + "a")) == text + "a"


def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    reply = LiveReply(
        RENDERER,
        FORMATS["plain"].begin(Situation()),
        stops=["END"],
        turn_id=TURN,
        has_logprobs=True,
    )
    (a,) = reply.feed(list(b"a"), [-0.5])
    assert reply.feed(list(b"E"), [-1.0]) == []
    (ex,) = reply.feed(list(b"x"), [-2.0])
    assert [(t.text, t.logprob) for t in a.logprobs] == [("a", -0.5)]
    assert [(t.text, t.logprob) for t in ex.logprobs] == [("E", -1.0), ("x", -2.0)]


def test_parts_of_neighbouring_kinds_are_not_mixed() -> None:
    told = [AnswerPiece(reasoning="a"), AnswerPiece(reasoning="b"), AnswerPiece(content="c")]
    assert merged(told) == [AnswerPiece(reasoning="ab"), AnswerPiece(content="c")]


def test_no_work_is_done_twice_in_a_long_reply() -> None:
    decoded = 0

    class Counting(Bytes):
        def decode(self, ids: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids)

    def work(num_tokens: int) -> int:
        nonlocal decoded
        decoded = 0
        reply = LiveReply(
            Counting(),
            FORMATS["qwen"].begin(Situation()),
            stops=["zz"],
            turn_id=TURN,
            has_logprobs=False,
        )
        for _ in range(num_tokens):
            reply.feed([97])
        assert math.isclose(len(reply_of(reply._parts).content), num_tokens)
        return decoded

    assert work(4000) < 12 * work(400)
