"""Waits for the end of a turn on a GPU, whose kernels may still run when the host has finished.

An event is recorded behind the turn's kernels. The thread of turns waits for the event before it
publishes the turn as given back, so no stream and no other process waits for the device. A wait
queued on a stream would be dangerous: a process may die before its kernels are done, and such a
wait cannot be cancelled. Our design.
"""

import logging
import os
import warnings
from collections.abc import Sequence

import torch

from crossover_ddp._system import environment
from crossover_ddp._system.cuda_driver import adopt_thread
from crossover_ddp.errors import UnsupportedConfigurationError

logger = logging.getLogger(__name__)


def order_on(device: torch.device) -> "DeviceOrder | None":
    """Return a `DeviceOrder` for one of this process's devices.

    Return None for a CPU, where a turn's work is done as soon as the host has finished it.
    """
    if os.environ.get(environment.DEVICE_ORDER, "") not in ("", "host"):
        warnings.warn(
            f"{environment.DEVICE_ORDER} no longer has an effect: turns are ordered on the host; "
            "unset it",
            FutureWarning,
            stacklevel=2,
        )
    return DeviceOrder(device) if device.type == "cuda" else None


class DeviceOrder:
    """Mark the ends of turns on a GPU, and wait for them."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu
        # A stream that joins several streams at the end of a turn. It is created when first needed.
        self._end_stream: torch.cuda.Stream | None = None
        # The streams on which the last turn ended.
        self._computing: Sequence[torch.cuda.Stream] = ()

    def check_usable(self) -> None:
        """Raise `UnsupportedConfigurationError` while the current stream captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedConfigurationError(
                "expected turns to begin and end outside of a CUDA graph, got a stream that is "
                "capturing: a replay would take no turn; acquire before replay() and release after "
                "it"
            )

    def streams(self) -> Sequence[torch.cuda.Stream]:
        """Return the streams on which a turn that begins now may compute.

        These are the current stream and the default stream.
        """
        return torch.cuda.current_stream(self._gpu), torch.cuda.default_stream(self._gpu)

    def mark(self, streams: Sequence[torch.cuda.Stream] = ()) -> torch.cuda.Event:
        """Record an event behind all work queued on the current stream and on ``streams``.

        The event marks the end of a turn.

        Args:
            streams: further streams on which the turn computed; default none.
        """
        stream = torch.cuda.current_stream(self._gpu)
        self._computing = (stream, *streams)
        if streams:
            self._end_stream = self._end_stream or torch.cuda.Stream(self._gpu)
            for each in self._computing:
                self._end_stream.wait_stream(each)
            stream = self._end_stream
        end = torch.cuda.Event(blocking=True)
        end.record(stream)
        return end

    def wait(self, end: torch.cuda.Event) -> None:
        """Block until the device has reached ``end``. Call this on a thread of this package."""
        torch.cuda.set_device(self._gpu)
        adopt_thread()
        try:
            end.synchronize()
        except RuntimeError as error:
            # A broken CUDA context no longer runs kernels. Training gets the same error.
            logger.debug("a turn on %s ended with an error of the device: %s", self._gpu, error)

    def is_done(self, streams: Sequence[torch.cuda.Stream]) -> bool:
        """Return whether the device has finished all of a turn's work that was queued so far.

        This also checks the streams on which the last turn ended, since user code may compute on a
        stream other than the one that took the turn. Call this on a thread of this package.

        Args:
            streams: the streams on which the turn began.
        """
        torch.cuda.set_device(self._gpu)
        adopt_thread()
        for stream in (*streams, *self._computing):
            with torch.cuda.stream(stream):
                # Querying a stream that captures a graph would break the capture.
                if torch.cuda.is_current_stream_capturing() or not stream.query():
                    return False
        return True
