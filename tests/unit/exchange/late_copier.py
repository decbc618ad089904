"""A stand-in for CUDA copies that copies as late as it may, so that a missing wait shows."""

from collections.abc import Callable

import torch


class LateCopier:
    """Copy down when the mark is waited for, up when the test says so or a step on the device needs it."""

    def __init__(self) -> None:
        self.downs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.given_back = 0

    def begin(self) -> None:
        pass

    def down(self, host: torch.Tensor, device: torch.Tensor) -> "LateMark":
        self.downs.append((host, device))
        return LateMark(host, device)

    def up(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.ups.append((device, host))

    def step(
        self, device: torch.Tensor, host: torch.Tensor, owner_step: Callable[[torch.Tensor], None]
    ) -> "LateMark":
        self.up(device, host)
        self.finish()
        owner_step(device)
        return LateMark(host, device)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel + 3,), torch.nan, dtype=dtype)

    def give_back(self, host: torch.Tensor) -> None:
        self.given_back += 1

    def finish(self) -> None:
        """Do all copies up, in order, from what the host memory holds only now."""
        for device, host in self.ups:
            device.copy_(host)
        self.ups.clear()


class LateMark:
    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host, self._device = host, device

    def synchronize(self) -> None:
        self._host.copy_(self._device)
