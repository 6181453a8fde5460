"""Full token sequences rebuilt from delta-encoded turns, and the longest exact token prefix.

A turn stores only its own tokens, the rest is shared with its parent, so T turns that end at N
tokens take O(N) memory:

    t0: own [1 2 | 3 4]                        full 1 2 3 4
    t1: parent t0, shared 4, own [5 | 6]       full 1 2 3 4 5 6
    t2: parent t0, shared 2, own [9 | 7]       full 1 2 9 7
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from turnfold.history.errors import HistoryError
from turnfold.schemas.events import TurnCompleted

Ids: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `shared_len` tokens of the full sequence of a turn."""

    turn_id: str
    shared_len: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a sequence came from the prompt or the output of this turn."""

    turn_id: str
    start: int
    stop: int
    is_output: bool


@dataclass(slots=True, eq=False)
class _Node:
    turn_id: str
    order: int
    start: int
    """Tokens shared with `owner`; own[0] is token number `start` of the full sequence."""
    own: Ids
    num_output: int
    parent: Prefix | None
    owner: _Node | None
    """The ancestor whose own tokens include token `start - 1`."""
    forks: list[_Node] = field(default_factory=list)
    """Nodes that this one is the owner of."""
    children: list[str] = field(default_factory=list)
    """Turns that this one is the parent of, in order of arrival."""

    @property
    def length(self) -> int:
        return self.start + len(self.own)

    @property
    def prompt_length(self) -> int:
        return self.length - self.num_output


class TokenStore:
    """The token sequences of the turns of one rollout (or of one session of it).

    `add` folds one event; a second event of the same turn changes nothing. Arrays that come out are
    uint32, one dimension; `full` and `prompt` are fresh copies.
    """

    def __init__(self, rollout_id: str = "") -> None:
        self.rollout_id = rollout_id
        self._nodes: dict[str, _Node] = {}
        self._roots: list[_Node] = []

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, turn: TurnCompleted) -> bool:
        """Add a turn; False when it is known already.

        A turn that declares no parent gets the longest exact token prefix among the turns so far.
        Raises HistoryError when the parent is unknown, counts disagree, or the turn was recorded
        with other tokens before.
        """
        self._check_counts(turn)
        parent = self._declared_parent(turn)
        own: Ids = np.concatenate((turn.prompt_tail.array, turn.output_ids.array))
        if turn.turn_id in self._nodes:
            self._check_same(turn, own)
            return False
        self.put(turn.turn_id, parent, own, len(turn.output_ids))
        return True

    def put(self, turn_id: str, parent: Prefix | None, own: Ids, num_output: int) -> None:
        """Add a turn that is new and sound; `own` is its prompt after the parent's and its output.

        Without a parent it gets the longest exact token prefix, as in `add`.
        """
        if parent is None:
            # The prompt alone is looked up: an output that happens to equal another is no context.
            parent = self.longest_prefix(own[: len(own) - num_output])
            own = own[parent.shared_len :].copy() if parent else own
        self._insert(turn_id, parent, own, num_output)

    def full(self, turn_id: str) -> Ids:
        """Prompt and output of the turn."""
        node = self._nodes[turn_id]
        return _materialise(node, node.length)

    def prompt(self, turn_id: str) -> Ids:
        """The exact context that the engine was given for this turn."""
        node = self._nodes[turn_id]
        return _materialise(node, node.prompt_length)

    def output(self, turn_id: str) -> Ids:
        """The sampled tokens of the turn, a view."""
        node = self._nodes[turn_id]
        return node.own[len(node.own) - node.num_output :]

    def length(self, turn_id: str) -> int:
        """Number of tokens of prompt and output."""
        return self._nodes[turn_id].length

    def prompt_length(self, turn_id: str) -> int:
        """Number of tokens of the prompt."""
        return self._nodes[turn_id].prompt_length

    def parent(self, turn_id: str) -> Prefix | None:
        """What the turn shares with which earlier turn: as declared, or as found when it was not."""
        return self._nodes[turn_id].parent

    def children(self, turn_id: str) -> tuple[str, ...]:
        """The turns whose parent this one is, in order of arrival."""
        return tuple(self._nodes[turn_id].children)

    def is_extension(self, turn_id: str) -> bool:
        """Whether the prompt repeats the whole sequence of the parent."""
        parent = self._nodes[turn_id].parent
        return parent is not None and parent.shared_len == self._nodes[parent.turn_id].length

    def is_continued(self, turn_id: str) -> bool:
        """Whether some later turn extends the whole sequence of this one."""
        return any(self.is_extension(child) for child in self._nodes[turn_id].children)

    def spans(self, turn_id: str, start: int = 0) -> tuple[Span, ...]:
        """Who put each token of the full sequence there, from token `start` to the last.

        t0: [1 2] -> [3 4], t1: parent t0, shared 4, [5] -> [6]
            spans(t1): t0 prompt [0, 2), t0 output [2, 4), t1 prompt [4, 5), t1 output [5, 6)
        """
        spans: list[Span] = []
        node: _Node | None = self._nodes[turn_id]
        end = node.length if node else 0
        while node is not None and end > start:
            middle = min(node.prompt_length, end)
            for first, last, is_output in ((middle, end, True), (node.start, middle, False)):
                if max(first, start) < last:
                    spans.append(Span(node.turn_id, max(first, start), last, is_output))
            end, node = node.start, node.owner
        return tuple(reversed(spans))

    def of_span(self, span: Span) -> Ids:
        """The tokens of a span, a view."""
        node = self._nodes[span.turn_id]
        return node.own[span.start - node.start : span.stop - node.start]

    def longest_prefix(self, ids: Ids) -> Prefix | None:
        """The turn whose sequence shares the most leading tokens with `ids`; None if none does.

        Walks the tree of sequences, so the cost is that of the shared tokens plus one comparison a
        branch. On a tie a turn that is shared as a whole wins, then the latest.
        """
        best: tuple[int, bool, int] = (0, False, -1)
        found: _Node | None = None
        pending = list(self._roots)
        while pending:
            node = pending.pop()
            shared = node.start + common_prefix_len(node.own, ids[node.start :])
            if shared == node.start:
                continue
            rank = (shared, shared == node.length, node.order)
            if rank > best:
                best, found = rank, node
            pending += [fork for fork in node.forks if fork.start <= shared]
        return Prefix(found.turn_id, best[0]) if found else None

    def _insert(self, turn_id: str, parent: Prefix | None, own: Ids, num_output: int) -> None:
        shared_len = parent.shared_len if parent else 0
        owner = self._owner(parent)
        node = _Node(turn_id, len(self._nodes), shared_len, own, num_output, parent, owner)
        self._nodes[turn_id] = node
        (owner.forks if owner else self._roots).append(node)
        if parent:
            self._nodes[parent.turn_id].children.append(turn_id)

    def _owner(self, parent: Prefix | None) -> _Node | None:
        node = self._nodes[parent.turn_id] if parent else None
        while node is not None and parent is not None and parent.shared_len <= node.start:
            node = node.owner
        return node

    def _declared_parent(self, turn: TurnCompleted) -> Prefix | None:
        if turn.parent_turn_id is None:
            return None
        parent = self._nodes.get(turn.parent_turn_id)
        if parent is None or turn.parent_turn_id == turn.turn_id:
            raise self._error(turn, f"parent {turn.parent_turn_id} is not in this rollout")
        if turn.shared_len > parent.length:
            raise self._error(
                turn,
                f"shared_len: expected at most {parent.length}, the length of parent "
                f"{parent.turn_id}, got {turn.shared_len}",
            )
        return Prefix(turn.parent_turn_id, turn.shared_len)

    def _check_counts(self, turn: TurnCompleted) -> None:
        if turn.shared_len < 0 or (turn.parent_turn_id is None and turn.shared_len):
            raise self._error(
                turn, f"shared_len: expected 0 for a turn without parent, got {turn.shared_len}"
            )
        expected = turn.shared_len + len(turn.prompt_tail)
        if turn.num_prompt_tokens != expected:
            raise self._error(
                turn,
                f"num_prompt_tokens: expected {expected} (shared_len {turn.shared_len} + "
                f"{len(turn.prompt_tail)} in prompt_tail), got {turn.num_prompt_tokens}",
            )
        if len(turn.logprobs) != len(turn.output_ids):
            raise self._error(
                turn,
                f"logprobs: expected {len(turn.output_ids)}, one per output token, "
                f"got {len(turn.logprobs)}",
            )

    def _check_same(self, turn: TurnCompleted, own: Ids) -> None:
        node = self._nodes[turn.turn_id]
        # Where the parent was found and not declared, `own` starts at the first token.
        tail = own[len(own) - len(node.own) :] if len(own) >= len(node.own) else own
        is_same = (
            np.array_equal(tail, node.own)
            and node.length == turn.num_prompt_tokens + len(turn.output_ids)
            and node.num_output == len(turn.output_ids)
        )
        if not is_same:
            raise self._error(turn, "was recorded before with other tokens")

    def _error(self, turn: TurnCompleted, problem: str) -> HistoryError:
        return HistoryError(
            f"rollout {self.rollout_id or turn.rollout_id}, turn {turn.turn_id}: {problem}"
        )


def common_prefix_len(a: Ids, b: Ids) -> int:
    """How many leading tokens are equal; reads little more than those."""
    size = min(len(a), len(b))
    done, step = 0, 64
    while done < size:
        stop = min(size, done + step)
        differs = a[done:stop] != b[done:stop]
        if differs.any():
            return done + int(differs.argmax())
        done, step = stop, step * 4
    return size


def _materialise(node: _Node, end: int) -> Ids:
    ids = np.empty(end, dtype=np.uint32)
    current: _Node | None = node
    while current is not None:
        if current.start < end:
            ids[current.start : end] = current.own[: end - current.start]
            end = current.start
        current = current.owner
    return ids
