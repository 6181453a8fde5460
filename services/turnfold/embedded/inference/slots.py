"""Which slots of the KV cache are free, and which tokens each free slot still holds."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Leftover:
    token_ids: Sequence[int] = ()
    cache_salt: str | None = None


class SlotTable:
    """Hands out slots, the one with the longest common prefix first.

        released: slot 0 holds [1 2 3 4], slot 1 holds [1 9]
        take([1 2 3 7])  ->  slot 0, of which 3 tokens need not be computed again

    The owner calls `forget` whenever the weights change, so a prefix is only ever reused under the
    weights that computed it. Requests with different cache salts never share a prefix.
    """

    def __init__(self, num_slots: int) -> None:
        # In the order of release: among equals the slot that lay idle longest is taken.
        self._free = {slot: _Leftover() for slot in range(num_slots)}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, prompt_ids: Sequence[int], cache_salt: str | None = None) -> tuple[int, int]:
        """A free slot, and how many leading tokens of the prompt it holds already.

        At least one token of the prompt is left to compute, since its logits are what sampling
        starts from.
        """
        best_slot, best_shared = next(iter(self._free)), 0
        for slot, leftover in self._free.items():
            if leftover.cache_salt != cache_salt or len(leftover.token_ids) <= best_shared:
                continue
            shared = min(_shared_len(leftover.token_ids, prompt_ids), len(prompt_ids) - 1)
            if shared > best_shared:
                best_slot, best_shared = slot, shared
        del self._free[best_slot]
        return best_slot, best_shared

    def release(self, slot: int, token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Give a slot back. `token_ids` are the tokens whose keys and values it holds."""
        assert slot not in self._free, f"slot {slot} was released twice"
        self._free[slot] = _Leftover(token_ids, cache_salt)

    def forget(self) -> None:
        """Reuse nothing of what the free slots hold."""
        self._free = dict.fromkeys(self._free, _Leftover())


def _shared_len(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
