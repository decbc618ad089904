"""Memory that is used again.

[Note: used again] The kernel maps a fresh tensor of megabytes page by page, which takes longer than to write it. So
messages stay where they were in the last step, and what is needed only for a moment lies in one memory per thread.
"""

import threading

import torch

_HOST = torch.device("cpu")


class Scratch(threading.local):
    """Floats for a moment: each thread has its own of the host's, which grow as needed.

    A thread may use what it took until it takes again.
    """

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def take(self, numel: int, device: torch.device = _HOST) -> torch.Tensor:
        """Return ``numel`` float32 that hold anything."""
        if device.type != "cpu":
            return torch.empty(numel, device=device)  # torch keeps a device's memory itself
        if self._floats.numel() < numel:
            self._floats = torch.empty(numel)
        return self._floats[:numel]

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return as many float32 as there are ``values``, in their shape."""
        return self.take(values.numel(), values.device).view(values.shape)


class MessageMemory:
    """Bytes that hold a message of each step in turn.

    Zeros at first, not empty: what padding holds should not be what the process had there before.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.zeros(0, dtype=torch.uint8, device=device)

    def take(self, size: int) -> torch.Tensor:
        """Return ``size`` bytes; what was taken before is no longer of use."""
        if len(self._bytes) < size:
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=self._bytes.device)
        return self._bytes[:size]
