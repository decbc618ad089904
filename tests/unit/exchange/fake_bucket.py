"""What a hook sees of a bucket and of a mutex, without DDP and without devices."""

import threading

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


class FakeTurn:
    """A turn that notes what is called on which thread, and gives the turn when the test opens the gate."""

    shared = True

    def __init__(self, *, gate: threading.Event | None = None) -> None:
        self.calls: list[tuple[str, str]] = []
        self._gate = gate

    def release(self) -> None:
        self._note("release")

    def request(self) -> None:
        self._note("request")

    def acquire(self, *, ahead: bool = False) -> None:
        if self._gate is not None:
            assert self._gate.wait(30)
        self._note("acquire")

    @property
    def order(self) -> list[str]:
        return [call for call, _ in self.calls]

    def _note(self, call: str) -> None:
        self.calls.append((call, threading.current_thread().name))


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}
