"""The bytes that coded steps have sent, beside those of exact ones."""

from .bucket import CodedBucket
from .device_bucket import DeviceBucket


class AchievedRate:
    """What the buckets of one model have sent since the beginning, in bytes of this rank."""

    def __init__(self) -> None:
        self._sent_bytes = self._exact_bytes = 0

    def count(self, coded: CodedBucket | DeviceBucket, exact_bytes: int) -> None:
        """Count what a bucket's former step has sent; a ring without a codec would have sent ``exact_bytes``."""
        if coded.sent_bytes:
            self._sent_bytes += coded.sent_bytes
            self._exact_bytes += exact_bytes

    def stats(self, steps: int, residual_bytes: int) -> dict[str, float]:
        """Return what a state's ``stats`` tells of its codec."""
        rate = self._sent_bytes / self._exact_bytes if self._exact_bytes else 1.0
        return {
            "steps": steps,
            "sent_bytes": self._sent_bytes,
            "rate": rate,
            "residual_bytes": residual_bytes,
        }
