"""The model behind the engine: loaded, run over the slot cache, its weights replaced."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnfold.embedded.inference.cache import SlotCache

PREFILL_CHUNK = 512
"""Prompt tokens per forward pass: bounds the size of the attention mask."""


class SlotModel:
    """A causal language model whose keys and values live in a `SlotCache`.

    Logits come back as float32 on the CPU, whatever the model runs on, so that sampling is the same
    everywhere.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        num_slots: int,
        max_len: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        self._model.to(device).eval()
        self._device = torch.device(device)
        self.num_slots = num_slots
        self.max_len = min(max_len, self._model.config.max_position_embeddings)
        self.vocab_size: int = self._model.config.vocab_size
        self._cache = SlotCache(self._model.config, num_slots, self.max_len, dtype, self._device)

    @property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence ids of `generation_config.json`, or of `config.json`, in order."""
        eos = self._model.generation_config.eos_token_id
        if eos is None:
            return []
        return list(eos) if isinstance(eos, list) else [eos]

    def prefill(self, slot: int, token_ids: Sequence[int], start: int = 0) -> torch.Tensor:
        """Compute tokens `start…` of a slot that holds the earlier ones. Returns the last
        logits, `[1, V]`.
        """
        assert start < len(token_ids), f"nothing to compute: {start} of {len(token_ids)} cached"
        logits_1V = torch.empty(0)
        for begin in range(start, len(token_ids), PREFILL_CHUNK):
            chunk = list(token_ids[begin : begin + PREFILL_CHUNK])
            places = torch.arange(begin, begin + len(chunk))[None]
            logits_1V = self._forward([slot], torch.tensor([chunk]), places)
        return logits_1V

    def decode(
        self, slots: Sequence[int], token_ids: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """One token for each of B slots, at its position. Returns `[B, V]`."""
        return self._forward(
            slots, torch.tensor(token_ids)[:, None], torch.tensor(positions)[:, None]
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's own parameters and persistent buffers by name, each tied tensor once."""
        names = dict(self._model.named_parameters())
        persistent = set(self._model.state_dict())
        names |= {k: v for k, v in self._model.named_buffers() if k in persistent}
        return names

    def aliases(self) -> set[str]:
        """Every name that a checkpoint may use, those of tied tensors included."""
        return set(self._model.state_dict())

    def replace_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite every parameter in place. Names and shapes must have been checked before."""
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(weights[name])

    def _forward(
        self, slots: Sequence[int], token_ids_BT: torch.Tensor, positions_BT: torch.Tensor
    ) -> torch.Tensor:
        visible = int(positions_BT.max()) + 1
        positions_BT = positions_BT.to(self._device)
        places = torch.arange(visible, device=self._device)
        mask_B1TL = (places <= positions_BT[:, :, None])[:, None]
        self._cache.aim(torch.tensor(slots, device=self._device), positions_BT, visible)
        with torch.inference_mode():
            output = self._model(
                input_ids=token_ids_BT.to(self._device),
                position_ids=positions_BT,
                attention_mask=mask_B1TL,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float().cpu()
