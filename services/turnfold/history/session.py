"""The state of one session, folded from its turns, and the lookup of the turn a request continues.

Every stored history (prompt messages and reply) is indexed by the last digest of its chain, so the
lookup costs one pass over the request, whatever the number of turns and branches:

    t0: u1 -> r1          index: H(u1 r1) t0
    t1: u1 r1 u2 -> r2           H(u1 r1 u2 r2) t1
    request u1 r1 u3             deepest digest in the index: H(u1 r1), so it continues t0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from turnfold.history.canonical import (
    CosmeticRules,
    extend_chain,
    is_dropped_part_edited,
    tools_digest,
)
from turnfold.history.divergence import Difference, cosmetic_causes, is_identical
from turnfold.history.errors import HistoryError
from turnfold.history.render_memo import RenderMemo
from turnfold.history.sequences import Ids, TokenStore
from turnfold.schemas.events import TurnCompleted
from turnfold.schemas.messages import ChatMessage, Tool

if TYPE_CHECKING:
    from turnfold.history.saved_text import Piece


@dataclass(frozen=True, slots=True)
class Match:
    """The turn that a request continues."""

    turn_id: str
    num_messages: int
    """Leading messages of the request that are the stored history of the turn."""
    differences: tuple[Difference, ...] = ()
    """Where the client changed something that does not count."""


@dataclass(slots=True, eq=False)
class _Turn:
    turn_id: str
    parent: _Turn | None
    """Where the first `shared` messages of the history come from."""
    shared: int
    own: tuple[ChatMessage, ...]
    """The messages after the shared ones, the reply last where there is one."""
    has_reply: bool
    tools: tuple[Tool, ...]
    tools_digest: bytes
    digests: list[bytes]
    """digests[i] covers the tools and the first first_digest + i messages."""
    first_digest: int

    @property
    def num_messages(self) -> int:
        return self.shared + len(self.own)

    @property
    def num_prompt_messages(self) -> int:
        return self.num_messages - self.has_reply


@dataclass(slots=True)
class _LastRequest:
    """What was found out about the last request: the next one mostly begins with the same messages."""

    messages: Sequence[ChatMessage] = ()
    tools: tuple[bytes, bytes] = (b"", b"")
    """The tools, encoded, and their digest."""
    chained: Sequence[ChatMessage] = ()
    chain: list[bytes] = field(default_factory=list)
    """The digests of `chained`."""
    compared: dict[int, tuple[ChatMessage, ChatMessage, tuple[str, ...] | None]] = field(
        default_factory=dict
    )
    """By index: a stored message, the one that came, and how they differ; None for an edit."""


@dataclass(slots=True)
class _Index:
    histories: dict[bytes, list[str]] = field(default_factory=dict)
    """Digest of prompt and reply: the turns that end there, oldest first."""
    prompts: dict[bytes, list[str]] = field(default_factory=dict)
    """Digest of the prompt messages: the turns that were asked this."""
    prefixes: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """Digest of any message prefix: the first turn that has it, and its number of messages."""


class Session:
    """What one conversation of a rollout has said so far, in messages and in tokens.

    `apply` folds one event, in log order; a redelivered event changes nothing. Memory grows with the
    final tokens and messages: a turn holds only what its parent does not.
    """

    def __init__(
        self,
        session_id: str,
        rollout_id: str = "",
        rules: CosmeticRules = CosmeticRules(),
    ) -> None:
        self.session_id = session_id
        self.rules = rules
        self.sequences = TokenStore(rollout_id)
        self.is_passthrough = False
        """Healing was switched off by policy `passthrough` in an earlier turn."""
        self.texts: dict[tuple[str, bool], str] = {}
        """Cache of decoded spans by (turn, is_output); holds nothing the fold does not."""
        self.pieces: tuple[str, tuple[Piece, ...]] = ("", ())
        """Cache: the texts of the sequence of one turn, in order."""
        self.retokenized: dict[str, bool] = {}
        """Cache: whether re-encoding the text of a turn's output gives other tokens."""
        self.encoded: dict[str, Ids] = {}
        """Cache: the tokens of parts of renders, cut where tokens never reach across."""
        self.renders = RenderMemo()
        """Cache of what the renders of the session have written."""
        self._turns: dict[str, _Turn] = {}
        self._index = _Index()
        self._last = _LastRequest()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._turns)

    @property
    def last_turn_id(self) -> str | None:
        """The turn folded last."""
        return next(reversed(self._turns), None)

    def apply(self, event: TurnCompleted) -> bool:
        """Fold one turn; False when it is known already.

        Raises HistoryError when it contradicts the turns before it, see `TokenStore.add`.
        """
        if event.turn_id not in self._turns:
            parent = self._parent(event)
            self.sequences.add(event)
            self._insert(event, parent)
            self.is_passthrough |= event.continuity == "passthrough"
            return True
        return self.sequences.add(event)

    def recognised(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages of a request; those that the last one had in the same place as its objects.

        What is known of a message is found by the object, so it is found out once.
        """
        last = self._last.messages
        found = [
            old if is_identical(old, new) else new for old, new in zip(last, messages, strict=False)
        ]
        self._last.messages = [*found, *messages[len(found) :]]
        return self._last.messages

    def chain(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None) -> list[bytes]:
        """The digests of a request, for several lookups of the same one."""
        last, seed = self._last, self._tools_digest(tools)
        num_known = 0
        if last.chain[:1] == [seed]:
            pairs = enumerate(zip(last.chained, messages, strict=False))
            num_common = min(len(last.chained), len(messages))
            num_known = next((i for i, (old, new) in pairs if old is not new), num_common)
        known = last.chain[:num_known] if num_known else []
        start = last.chain[num_known] if num_known else seed
        last.chain = known + extend_chain(start, messages[num_known:], self.rules)
        last.chained = messages
        return last.chain

    def _tools_digest(self, tools: Sequence[Tool] | None) -> bytes:
        encoded = msgspec.json.encode(tools or ())
        if self._last.tools[0] != encoded:
            self._last.tools = (encoded, tools_digest(tools))
        return self._last.tools[1]

    def lookup(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        chain: list[bytes] | None = None,
    ) -> Match | None:
        """The deepest turn whose stored history the request begins with; None when there is none.

        Among turns with equal histories (a retry that got the same answer) the one whose call ids
        came back wins, then one that came back to the letter, then one that nobody continued yet,
        then the latest.
        """
        chain = chain or self.chain(messages, tools)
        for count in range(len(messages), 0, -1):
            for turn_id in self._ranked(self._index.histories.get(chain[count], ()), messages):
                differences = self._differences(self.history(turn_id), messages)
                if differences is not None:
                    return Match(turn_id, count, differences)
        return None

    def retried(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        chain: list[bytes] | None = None,
    ) -> str | None:
        """The first turn that was asked exactly this already, canonically."""
        chain = chain or self.chain(messages, tools)
        for turn_id in self._index.prompts.get(chain[-1], ()):
            if self._differences(self.prompt_messages(turn_id), messages) is not None:
                return turn_id
        return None

    def common_messages(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None
    ) -> tuple[str, int] | None:
        """A turn that shares the most leading messages with the request, and how many.

        The latest turn if it is one of them: it shows best what the request leaves out.
        """
        chain = self.chain(messages, tools)
        last = self._turns[self.last_turn_id] if self.last_turn_id is not None else None
        for digest in reversed(chain[1:]):
            found = self._index.prefixes.get(digest)
            if found is not None and last is not None:
                turn_id, count = found
                is_last = count <= last.num_messages and _digest_at(last, count) == digest
                return (last.turn_id, count) if is_last else (turn_id, count)
        return None

    def history(self, turn_id: str) -> list[ChatMessage]:
        """The prompt messages of the turn and its reply, as they were stored."""
        turn = self._turns[turn_id]
        return _materialise(turn, turn.num_messages)

    def prompt_messages(self, turn_id: str) -> list[ChatMessage]:
        """The messages of the turn's request, as they were stored."""
        turn = self._turns[turn_id]
        return _materialise(turn, turn.num_prompt_messages)

    def new_messages(self, turn_id: str) -> tuple[int, tuple[ChatMessage, ...]]:
        """How many messages the turn's request shares with its parent's history, and the others."""
        turn = self._turns[turn_id]
        return turn.shared, turn.own[: len(turn.own) - turn.has_reply]

    def tools(self, turn_id: str) -> tuple[Tool, ...]:
        """The tool schemas of the turn, its parent's where it named none."""
        return self._turns[turn_id].tools

    def has_tools(self, turn_id: str, tools: Sequence[Tool] | None) -> bool:
        """Whether the turn had this set of tools; their order does not matter."""
        return self._turns[turn_id].tools_digest == tools_digest(tools)

    def _parent(self, event: TurnCompleted) -> _Turn | None:
        if event.parent_turn_id is None:
            limit, parent = 0, None
        else:
            parent = self._turns.get(event.parent_turn_id)
            if parent is None:
                raise self._error(event, f"parent {event.parent_turn_id} is not in this session")
            limit = parent.num_messages
        if not 0 <= event.shared_messages <= limit:
            raise self._error(
                event, f"shared_messages: expected 0 to {limit}, got {event.shared_messages}"
            )
        return parent

    def _insert(self, event: TurnCompleted, parent: _Turn | None) -> None:
        tools = parent.tools if event.tools is None and parent else event.tools or ()
        seed = tools_digest(tools)
        shares_digests = parent is not None and parent.tools_digest == seed
        own = event.new_messages + ((event.reply,) if event.reply else ())
        turn = _Turn(
            turn_id=event.turn_id,
            parent=parent if event.shared_messages else None,
            shared=event.shared_messages,
            own=own,
            has_reply=event.reply is not None,
            tools=tools,
            tools_digest=seed,
            digests=[],
            first_digest=event.shared_messages if shares_digests else 0,
        )
        if shares_digests and parent is not None:
            start = _digest_at(parent, event.shared_messages)
            turn.digests = extend_chain(start, own, self.rules)
        else:
            history = _materialise(turn, turn.num_messages)
            turn.digests = extend_chain(seed, history, self.rules)
        self._turns[event.turn_id] = turn
        self._add_to_index(turn)

    def _add_to_index(self, turn: _Turn) -> None:
        for count, digest in enumerate(turn.digests, start=turn.first_digest):
            self._index.prefixes.setdefault(digest, (turn.turn_id, count))
        if turn.num_prompt_messages:
            digest = _digest_at(turn, turn.num_prompt_messages)
            self._index.prompts.setdefault(digest, []).append(turn.turn_id)
            if turn.has_reply:
                self._index.histories.setdefault(turn.digests[-1], []).append(turn.turn_id)

    def _ranked(self, turn_ids: Sequence[str], messages: Sequence[ChatMessage]) -> Sequence[str]:
        if len(turn_ids) < 2:
            return turn_ids

        def rank(item: tuple[int, str]) -> tuple[bool, bool, bool, int]:
            order, turn_id = item
            turn = self._turns[turn_id]
            stored, incoming = turn.own[-1], messages[turn.num_messages - 1]
            has_ids = [c.id for c in stored.tool_calls] == [c.id for c in incoming.tool_calls]
            is_continued = self.sequences.is_continued(turn_id)
            return has_ids, is_identical(stored, incoming), not is_continued, order

        return [turn_id for _, turn_id in sorted(enumerate(turn_ids), key=rank, reverse=True)]

    def _differences(
        self, stored: Sequence[ChatMessage], messages: Sequence[ChatMessage]
    ) -> tuple[Difference, ...] | None:
        """What differs between canonically equal messages; None where a part was edited."""
        found: list[Difference] = []
        for index, (ours, theirs) in enumerate(zip(stored, messages, strict=False)):
            if ours is theirs:
                continue
            known = self._last.compared.get(index)
            if known is None or known[0] is not ours or known[1] is not theirs:
                known = self._last.compared[index] = (ours, theirs, self._causes(ours, theirs))
            if known[2] is None:
                return None
            found += [Difference(index, cause) for cause in known[2]]
        return tuple(found)

    def _causes(self, ours: ChatMessage, theirs: ChatMessage) -> tuple[str, ...] | None:
        if is_dropped_part_edited(ours, theirs, self.rules):
            return None
        return cosmetic_causes(ours, theirs)

    def _error(self, event: TurnCompleted, problem: str) -> HistoryError:
        rollout_id = self.sequences.rollout_id or event.rollout_id
        return HistoryError(f"rollout {rollout_id}, turn {event.turn_id}: {problem}")


def _digest_at(turn: _Turn, count: int) -> bytes:
    """The chain digest over the first `count` messages of the turn's history."""
    current: _Turn | None = turn
    while current is not None:
        if count >= current.first_digest:
            return current.digests[count - current.first_digest]
        current = current.parent
    raise AssertionError(f"turn {turn.turn_id}: no digest for its first {count} messages")


def _materialise(turn: _Turn, end: int) -> list[ChatMessage]:
    parts: list[tuple[ChatMessage, ...]] = []
    current: _Turn | None = turn
    while current is not None and end > 0:
        if end > current.shared:
            parts.append(current.own[: end - current.shared])
            end = current.shared
        current = current.parent
    return [message for part in reversed(parts) for message in part]
