"""A sampled reply as its parts, and the seam that a family of models implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from turnfold.schemas.messages import Tool, ToolCall
from turnfold.schemas.wire import Wire

MalformedReason = Literal[
    "bad_json",
    "not_an_object",
    "no_name",
    "bad_arguments",
    "bad_markup",
    "unclosed",
    "unknown_tool",
    "inside_reasoning",
    "too_many",
]
"""Why a call was not made.

    bad_json          the JSON cannot be read
    not_an_object     the JSON is no object
    no_name           nothing says which tool is called
    bad_arguments     the arguments are no object, or the log cannot hold them
    bad_markup        tags or markers stand where the family has none
    unclosed          the reply ended inside the call
    unknown_tool      JSON without any marker that names a tool which was not offered
    inside_reasoning  readable, but part of the thinking of a reply that went on without it
    too_many          what follows so many malformed calls is not looked at any more
"""


class MalformedCall(Wire, frozen=True, kw_only=True):
    """A call that was not made; its text stays where it stood, without control tokens.

    A readable call with the reason `inside_reasoning` is taken out of the reasoning.
    """

    reason: MalformedReason
    start: int
    """First character in the sampled text."""
    end: int


class ReasoningText(Wire, frozen=True, kw_only=True):
    """More of the reasoning."""

    text: str


class ContentText(Wire, frozen=True, kw_only=True):
    """More of the content."""

    text: str


class ReasoningSpan(Wire, frozen=True, kw_only=True):
    """Where reasoning stands in the sampled text; the marks around it are not part of it."""

    start: int
    """First character."""
    end: int


class CallMade(Wire, frozen=True, kw_only=True):
    """A whole call: one that may still turn out malformed is not shown in pieces."""

    index: int
    """Counts the calls of the reply from 0."""
    call: ToolCall


ReplyPart = ReasoningText | ContentText | CallMade | MalformedCall | ReasoningSpan


class ParsedReply(Wire, frozen=True, kw_only=True):
    """What the client sees of a sampled text."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    num_reasoning_tokens: int = 0
    """Sampled tokens of the reasoning; a parser, which sees no tokens, leaves it at 0."""


def reply_of(parts: Iterable[ReplyPart]) -> ParsedReply:
    """All parts of a reply put together."""
    parts = list(parts)
    return ParsedReply(
        reasoning="".join(part.text for part in parts if isinstance(part, ReasoningText)),
        content="".join(part.text for part in parts if isinstance(part, ContentText)),
        tool_calls=tuple(part.call for part in parts if isinstance(part, CallMade)),
        malformed=tuple(part for part in parts if isinstance(part, MalformedCall)),
    )


class Situation(Wire, frozen=True, kw_only=True):
    """What the request and the prompt say about the reply to come."""

    is_calling_allowed: bool = True
    is_reasoning_open: bool = False
    """The prompt ended inside a thinking block."""
    tools: tuple[Tool, ...] = ()
    """Those offered; their schemas type the values that a family writes as bare text."""


class ReplyParser(Protocol):
    """Reads one reply while it is sampled, in time linear in the text however it is cut.

        parser.feed("<think>hm</thi")  -> [ReasoningText("hm")]
        parser.feed("nk>It is")        -> [ContentText("It is")]
        parser.end()                   -> []

    Put together, the parts are those of the text read at once. Never fails.
    """

    def feed(self, text: str) -> list[ReplyPart]:
        """The parts that the text adds for certain; what may become a marker is held back."""
        ...

    def end(self) -> list[ReplyPart]:
        """The rest. The text must not have the stop token that ended it."""
        ...


class ReplyFormat(Wire, frozen=True, kw_only=True):
    """How a family of models writes its replies."""

    name: str
    begin: Callable[[Situation], ReplyParser]
    has_tools: bool
    """Whether calls can be read at all."""
    opens_reasoning: str = "<think>"
    """A prompt that ends with this leaves the reply inside a thinking block; "" when none does."""

    def is_reasoning_open(self, prompt_end: str) -> bool:
        """Whether the reply to a prompt with this end begins inside a thinking block."""
        return bool(self.opens_reasoning) and prompt_end.rstrip().endswith(self.opens_reasoning)

    def parse(
        self,
        text: str,
        is_calling_allowed: bool,
        is_reasoning_open: bool,
        tools: tuple[Tool, ...] = (),
    ) -> ParsedReply:
        """The parts of a whole text, which has no stop token."""
        parser = self.begin(
            Situation(
                is_calling_allowed=is_calling_allowed,
                is_reasoning_open=is_reasoning_open,
                tools=tools,
            )
        )
        return reply_of([*parser.feed(text), *parser.end()])
