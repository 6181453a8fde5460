"""A KV cache of fixed slots, in which requests of any length share a batch."""

from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):  # type: ignore[misc]  # transformers is unchecked
    """Keys and values in one tensor `[slots, kv_heads, max_len, head_dim]` per layer.

    Before each forward pass `aim` says where the batch's tokens belong:

        slots     [B]       the slot of each row
        positions [B, T]    the place of each token within its slot
        visible   int       how many leading places the attention may look at, the longest row's
            length

    Rows are ragged: the attention mask that the model is given hides what lies behind a shorter
    row's end.
    """

    def __init__(
        self, config: Any, num_slots: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # The parent's constructor builds layers that grow; these never do.
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        shape = (num_slots, config.num_key_value_heads, max_len, head_dim)
        layers = range(config.num_hidden_layers)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]

    def aim(self, slots: torch.Tensor, positions: torch.Tensor, visible: int) -> None:
        """Say where the next forward pass writes and how far it reads."""
        self._slots, self._positions, self._visible = slots, positions, visible

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values `[B, heads, T, dim]`; return all that the rows may look at."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows = self._slots[:, None].expand_as(self._positions)
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        return keys[self._slots, :, : self._visible], values[self._slots, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0, since positions are always given explicitly."""
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers."""
        return self._visible, 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_compileable(self) -> bool:
        return False
