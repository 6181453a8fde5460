"""Receive every version of the weights by a collective; gloo_engine.py is the other end.

    python examples/weights_over_gloo.py --port 29600 --to received --versions 3

Writes them down; an engine would load them instead. It needs torch, not verl. The sender says name,
shape and type of each parameter in the group's store. The group runs on CPUs; with NCCL in the
place of Gloo it is the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_PATIENCE = timedelta(days=1)


class Group:
    """Rank 0 and the receivers, which take the ranks behind it as they come."""

    def __init__(self, host: str, port: int, num_receivers: int, *, is_sender: bool) -> None:
        size = num_receivers + 1
        store = dist.TCPStore(host, port, is_master=is_sender, timeout=_PATIENCE)
        rank = 0 if is_sender else store.add("receivers", 1)
        # Gloo's own keys look like "0/1", as ours would without a prefix.
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, _PATIENCE)
        self._store = dist.PrefixStore("weights", store)

    def send(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """All parameters of a version."""
        place = 0
        for name, weight in weights:
            tensor = weight.detach().cpu().contiguous()
            kind = {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
            self._store.set(f"{version}/{place}", json.dumps(kind))
            self._gloo.broadcast(tensor, 0).wait()
            place += 1
        self._store.set(f"{version}/{place}", "null")

    def receive(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, as they come."""
        place = 0
        while (kind := json.loads(self._store.get(f"{version}/{place}"))) is not None:
            dtype = getattr(torch, kind["dtype"].removeprefix("torch."))
            tensor = torch.empty(kind["shape"], dtype=dtype)
            self._gloo.broadcast(tensor, 0).wait()
            yield kind["name"], tensor
            place += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Receive versions and write them down.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=29600)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--versions", type=int, required=True, help="How many, from 0 on.")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    from safetensors.torch import save_file

    options.to.mkdir(parents=True, exist_ok=True)
    group = Group(options.host, options.port, options.receivers, is_sender=False)
    for version in range(options.versions):
        save_file(dict(group.receive(version)), options.to / f"{version}.safetensors")
        print(f"version {version}")


if __name__ == "__main__":
    main()
