"""A stand-in for CUDA copies that copies as late as it may, so that a missing wait shows."""

from collections.abc import Callable

import torch


class LateCopier:
    """Copy down when the mark is waited for, up when the test says so or a step on the device needs it."""

    def __init__(self) -> None:
        self.downs: list[torch.Tensor] = []
        self.ups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pool: list[torch.Tensor] = []

    def begin(self) -> None:
        pass

    def down(self, host: torch.Tensor, device: torch.Tensor) -> "LateMark":
        self.downs.append(device)
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
        """Lend memory again that nobody holds, as torch does; copies that are still to come hold theirs."""
        for memory in self._pool:
            if memory.dtype == dtype and memory.numel() == numel and _is_only_reference(memory):
                return memory.fill_(torch.nan)[:]
        self._pool.append(torch.full((numel,), torch.nan, dtype=dtype))
        return self._pool[-1][:]

    def trim(self) -> None:
        self._pool.clear()

    def finish(self) -> None:
        """Do all copies up, in order, from what the host memory holds only now."""
        for device, host in self.ups:
            device.copy_(host)
        self.ups.clear()


def _is_only_reference(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor's and that one


class LateMark:
    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host, self._device = host, device

    def synchronize(self) -> None:
        self._host.copy_(self._device)
