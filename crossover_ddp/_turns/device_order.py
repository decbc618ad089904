"""The end of a turn on the device itself, whose kernels run on when the host has given the turn back. Our design.

An event is recorded behind the turn's kernels. The turns' own thread waits for it, and then publishes the turn as given
back: no stream, and no other process, waits for the device. A process may die before its kernels are done, and nobody
can take back a wait that a stream has been given.
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
    """Return the order on a device, as this process numbers it; None for a CPU, which is done when the host is."""
    if os.environ.get(environment.DEVICE_ORDER, "") not in ("", "host"):
        words = f"{environment.DEVICE_ORDER} has no effect any more: turns are ordered on the host; unset it"
        warnings.warn(words, FutureWarning, stacklevel=2)
    return DeviceOrder(device) if device.type == "cuda" else None


class DeviceOrder:
    """Marks the ends of turns on a GPU, and waits for them."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu
        self._end_stream: torch.cuda.Stream | None = None
        self._computing: Sequence[torch.cuda.Stream] = ()  # what the last turn ended on

    def check_usable(self) -> None:
        """Raise ``UnsupportedConfigurationError`` while the current stream captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedConfigurationError(
                "expected turns to begin and end outside of a CUDA graph, got a stream that is capturing: a replay "
                "would take no turn; acquire before replay() and release after it"
            )

    def streams(self) -> Sequence[torch.cuda.Stream]:
        """Return the streams on which a turn that begins now may compute: the current and the default one."""
        return torch.cuda.current_stream(self._gpu), torch.cuda.default_stream(self._gpu)

    def mark(self, streams: Sequence[torch.cuda.Stream] = ()) -> torch.cuda.Event:
        """Mark the end of a turn behind what the current stream, and ``streams``, have queued."""
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
        """Block until the device has reached ``end``. On a thread of the package's own."""
        torch.cuda.set_device(self._gpu)
        adopt_thread()
        try:
            end.synchronize()
        except (
            RuntimeError
        ) as error:  # nothing of a broken context runs any more; training will see it too
            logger.debug("a turn on %s ended with an error of the device: %s", self._gpu, error)

    def is_done(self, streams: Sequence[torch.cuda.Stream]) -> bool:
        """Say whether the device has done all that a turn has given it; ``streams``: what the turn began on.

        Who computes may have another stream than who took the turn: asked is what the last turn ended on, too. On a
        thread of the package's own.
        """
        torch.cuda.set_device(self._gpu)
        adopt_thread()
        for stream in (*streams, *self._computing):
            with torch.cuda.stream(stream):
                # To ask a stream that captures a graph would break the capture.
                if torch.cuda.is_current_stream_capturing() or not stream.query():
                    return False
        return True
