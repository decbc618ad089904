"""What a hook sees of a bucket and of a mutex, without DDP and without devices."""

import torch


class FakeBucket:
    """A gradient bucket as DDP would hand it to a hook."""

    def __init__(self, tensor: torch.Tensor, *, index: int = 0, last: bool = True) -> None:
        self._tensor, self._index, self._last = tensor, index, last

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[torch.Tensor]:
        return [self._tensor]
