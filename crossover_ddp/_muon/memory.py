"""The memory of what travels, lent again and again."""

from torch import Tensor

from .payload import Lender


class Memory:
    """Lends the two buffers of each bucket.

    What is summed is free again when the bucket has come back: on a CPU at once, so that a few buffers serve all
    buckets; on a GPU, where the device is behind the host, with the next backward. What comes back holds the
    directions until the step, so each bucket has its own.
    """

    def __init__(self) -> None:
        self._backs: dict[tuple[object, ...], Tensor] = {}
        self._free: list[Tensor] = []
        self._in_use_until_step: list[Tensor] = []
        self._largest, self._former_largest = 0, 0

    def begin(self) -> None:
        """A backward pass begins; the last one's Futures are complete. Drop what has become too large."""
        self._former_largest, self._largest = self._largest, 0
        free = [*self._free, *self._in_use_until_step]
        self._in_use_until_step = []
        # DDP's first bucket holds the whole model.
        self._free = [each for each in free if each.numel() <= self._former_largest]

    def lender(self, like: Tensor, bucket: int) -> Lender:
        """Return what lends memory of the kind of ``like``, the buffer of the bucket with this number."""

        def there(numel: int) -> Tensor:
            self._largest = max(self._largest, numel)
            fitting = [
                (each.numel(), number)
                for number, each in enumerate(self._free)
                if each.numel() >= numel and each.dtype == like.dtype and each.device == like.device
            ]
            return self._free.pop(min(fitting)[1]) if fitting else like.new_empty(numel)

        def back(numel: int) -> Tensor:
            key = (bucket, like.dtype, like.device)
            lent = self._backs.get(key)
            if lent is None or lent.numel() != numel:
                lent = self._backs[key] = like.new_empty(numel)
            return lent

        # Appended by the gatherer while the hook's thread may take another one: both are single operations.
        return Lender(there, self._in_use_until_step.append if like.is_cuda else self._free.append, back)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that are not in use, and of the directions."""
        return sum(each.nbytes for each in (*self._backs.values(), *self._free, *self._in_use_until_step))
