"""What the engine records in the timeline: the spans of its steps and buckets."""

import time

from crossover_ddp._timeline.record import Detail, Timeline

from .step import Step
from .transfer import Transfer


class ExchangeSpans:
    """Notes what one engine does; without a timeline every method returns at once.

    Args:
        timeline: where spans go; None: nowhere.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self.timeline = timeline

    def compute(self, step: Step, begin_s: float | None) -> None:
        """Note that ``step`` has computed since ``begin_s`` until its last hook; None: unknown since when."""
        if self.timeline is not None and begin_s is not None:
            self.timeline.span("compute", begin_s, step.last_hook_s, step=step.number)

    def half(
        self, kind: str, begin_s: float, transfer: Transfer, *, sent: tuple[int, int] | None = None
    ) -> None:
        """Note that one half of a bucket's exchange has lasted from ``begin_s`` until now.

        ``sent``: with a codec, the bytes that this rank has sent, and those that it would have sent without.
        """
        if self.timeline is None:
            return
        coded: dict[str, Detail] = {} if sent is None else {"sent_bytes": sent[0], "exact_bytes": sent[1]}
        step = transfer.step.number
        self.timeline.span(kind, begin_s, time.monotonic(), step=step, **transfer.in_words(), **coded)

    def exchange(self, transfer: Transfer, done_s: float) -> None:
        """Note that the exchange of the step that ``transfer`` ends was done at ``done_s``."""
        if self.timeline is not None:
            step, where = transfer.step, transfer.tensor.device.type
            self.timeline.span("exchange", step.last_hook_s, done_s, step=step.number, device_type=where)

    def wait(self, step: int, begin_s: float, end_s: float) -> None:
        """Note that the turn of step number ``step`` was waited for."""
        if self.timeline is not None:
            self.timeline.span("wait", begin_s, end_s, step=step)

    def flush(self) -> None:
        """Write what is waiting: the process may live on long after its group."""
        if self.timeline is not None:
            self.timeline.flush()
