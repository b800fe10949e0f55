"""Keeps the FP32 masters of a run: on its device, or where they are until an op needs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ampaudit.trace.converted import Release

__all__ = ["MasterWeights"]


class MasterWeights:
    """Masters by the name of their placeholder.

    Args:
        masters: the model's own tensors.
        device: of the run.
        release: gives the memory of a weight back until its next use.
        on_demand: whether weights are moved to the device for each use, or while they are held.
    """

    def __init__(
        self,
        masters: Mapping[str, torch.Tensor],
        device: torch.device,
        release: Release | None = None,
        *,
        on_demand: bool = False,
    ) -> None:
        stay = on_demand or release is not None
        self.all = {name: tensor if stay else tensor.to(device) for name, tensor in masters.items()}
        self._device = device
        self._release = release
        self._held: dict[str, torch.Tensor] = {}
        self._addresses: set[int] = set()  # of those that are held, which views share

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a master on the device."""
        held = self._held.get(name)
        return self.all[name].detach().to(self._device) if held is None else held

    def hold(self, names: Iterable[str], pool: dict[int, torch.Tensor]) -> None:
        """Keep weights on the device until ``let_go``, however often they are used.

        Args:
            names: of their placeholders.
            pool: what was moved for others already, by the identity of the master.
        """
        for name in names:
            key = id(self.all[name])
            if key not in pool:
                pool[key] = self[name]
            self._held[name] = pool[key]
            self._addresses.add(pool[key].data_ptr())

    def let_go(self) -> None:
        """Free the weights that are held."""
        held, self._held, self._addresses = self._held, {}, set()
        if self._release is not None:
            for name in held:
                self._release(self.all[name])

    def free(self, name: str, shown: object) -> None:
        """Free a weight after its last use, by its name, or by a view of it that was used last."""
        if self._release is None:
            return
        tensor = self.all.get(name) if shown is None else shown
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in self._addresses:
            self._release(tensor)
