"""A reply as the client sees it, read while its tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
import numpy as np

from turnfold.gateway.backends.engine import Generation
from turnfold.gateway.calls import AnswerPiece, TokenLogprob
from turnfold.gateway.parsing.replies import (
    CallMade,
    ContentText,
    ParsedReply,
    ReasoningText,
    ReplyParser,
    ReplyPart,
    reply_of,
)
from turnfold.gateway.parsing.spans import num_reasoning_tokens
from turnfold.gateway.turns.sampling.text import TextBeforeStop, TokenText
from turnfold.gateway.turns.steps import call_id, ends_with_stop_token
from turnfold.history.render import Renderer


class LiveReply:
    """Reads one reply in pieces; all of it is what `steps.parse_generation` reads at once.

        reply = LiveReply(renderer, parser, stops=[], turn_id="t1", has_logprobs=False)
        reply.feed([id of "It"])     -> [AnswerPiece(content="It")]
        reply.feed([id of "<|im_end|>"])  -> []
        reply.end(generation)        -> []
        reply.parsed                 -> ParsedReply(content="It")

    What may be a stop token, a stop sequence or a marker is held back until more is known. The
    exception is a stop token that is no added token of the tokenizer: its text has been shown by
    the time that the engine calls it one.
    """

    def __init__(
        self,
        renderer: Renderer,
        parser: ReplyParser,
        *,
        stops: Iterable[str],
        turn_id: str,
        has_logprobs: bool,
    ) -> None:
        self._renderer = renderer
        self._parser = parser
        self._turn_id = turn_id
        self._text = TokenText(renderer.decode)
        self._before_stop = TextBeforeStop(stops)
        self._num_fed = 0
        """Tokens that were read as text."""
        self._held: list[int] = []
        """Added tokens at the end: one that ends the reply is not part of it."""
        self._parts: list[ReplyPart] = []
        self._num_reasoning_tokens = 0
        self._logprobs = _Logprobs(renderer) if has_logprobs else None

    @property
    def parsed(self) -> ParsedReply:
        """All that was read; the whole reply after `end`."""
        return msgspec.structs.replace(
            reply_of(self._parts), num_reasoning_tokens=self._num_reasoning_tokens
        )

    def feed(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> list[AnswerPiece]:
        """What the tokens add for certain."""
        if self._logprobs is not None:
            self._logprobs.add(ids, logprobs)
        ids = [*self._held, *ids]
        self._held = ids[-1:] if ids and ids[-1] in self._renderer.special_ids else []
        return self._read(ids[: len(ids) - len(self._held)])

    def end(self, generation: Generation) -> list[AnswerPiece]:
        """The rest of the reply that the engine has ended."""
        num_shown = len(generation.output_ids) - ends_with_stop_token(
            generation, self._renderer.special_ids
        )
        # Engines need not tell every token while it comes.
        pieces = self._read(generation.output_ids.array[self._num_fed : num_shown].tolist())
        text = self._before_stop.feed(self._text.end())
        text += self._before_stop.end(generation.stop_reason)
        pieces += self._pieces([*self._parser.feed(text), *self._parser.end()])
        self._num_reasoning_tokens = num_reasoning_tokens(
            self._parts, generation.output_ids.array, self._renderer.decode
        )
        if self._logprobs is not None:
            pieces += self._logprobs.rest(generation)
        return merged(pieces)

    def _read(self, ids: Sequence[int]) -> list[AnswerPiece]:
        self._num_fed += len(ids)
        text = self._before_stop.feed(self._text.feed(ids))
        return self._pieces(self._parser.feed(text)) if text else []

    def _pieces(self, parts: list[ReplyPart]) -> list[AnswerPiece]:
        self._parts += parts
        pieces = [piece for part in parts if (piece := self._piece(part)) is not None]
        return pieces if self._logprobs is None else self._logprobs.put_on(pieces)

    def _piece(self, part: ReplyPart) -> AnswerPiece | None:
        match part:
            case ReasoningText(text=text):
                return AnswerPiece(reasoning=text)
            case ContentText(text=text):
                return AnswerPiece(content=text)
            case CallMade(index=index, call=call):
                named = msgspec.structs.replace(call, id=call_id(self._turn_id, index))
                return AnswerPiece(tool_call=named)
        return None  # a malformed call, whose text comes as content, or where reasoning stood


class _Logprobs:
    """Deals out the logprobs of the tokens; text that was held back brings those it waited for."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._waiting: list[TokenLogprob] = []
        self._num_dealt = 0
        self._are_told = True
        """Whether the engine has told each token's logprob with it so far."""

    def add(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._are_told = self._are_told and len(ids) == len(logprobs)
        if self._are_told:
            self._waiting += token_logprobs(ids, logprobs, self._renderer)

    def put_on(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        """The pieces, the first one with text with the logprobs that wait."""
        for i, piece in enumerate(pieces):
            if self._waiting and piece.tool_call is None:
                dealt = tuple(self._waiting)
                self._num_dealt += len(dealt)
                self._waiting.clear()
                pieces[i] = msgspec.structs.replace(piece, logprobs=dealt)
        return pieces

    def rest(self, generation: Generation) -> list[AnswerPiece]:
        """A piece without text for the tokens that came after the last text."""
        ids = generation.output_ids.array[self._num_dealt :].tolist()
        logprobs = generation.logprobs.tolist()[self._num_dealt :]
        rest = tuple(token_logprobs(ids, logprobs, self._renderer))
        return [AnswerPiece(logprobs=rest)] if rest else []


def token_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], renderer: Renderer
) -> Iterator[TokenLogprob]:
    """Text and logprob of each token, the logprob as exact as it is recorded."""
    recorded = np.asarray(logprobs, dtype=np.float32).tolist()
    for token_id, logprob in zip(ids, recorded, strict=True):
        text = renderer.decode(np.array([token_id], dtype=np.uint32))
        yield TokenLogprob(text=text, logprob=logprob)


def merged(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """The pieces with neighbouring texts of one kind put together.

    merged([AnswerPiece(content="a"), AnswerPiece(content="b")]) -> [AnswerPiece(content="ab")]
    """
    found: list[AnswerPiece] = []
    for kind, group in groupby(pieces, _kind):
        neighbours = list(group)
        found += neighbours if kind == "call" or len(neighbours) == 1 else [_joined(neighbours)]
    return found


def _kind(piece: AnswerPiece) -> str:
    if piece.tool_call is not None:
        return "call"
    return "reasoning" if piece.reasoning else "content"


def _joined(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    return AnswerPiece(
        reasoning="".join(piece.reasoning for piece in pieces),
        content="".join(piece.content for piece in pieces),
        logprobs=tuple(token for piece in pieces for token in piece.logprobs),
    )
