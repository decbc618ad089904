"""The buckets of one backward pass that transfers carry."""

from typing import Any

from crossover_ddp._engine.buckets import Backward


class Step(Backward):
    """The buckets of one backward pass, up to the one that DDP calls the last; numbered from 0 by the engine."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.deferred: list[Any] = []
        self._held: list[Any] = []
        self._is_cut_short = False
        self.last_hook_s = 0.0
        self.compute_ended = False
        self.keeps_turn = False

    def hold(self, transfer: Any) -> bool:
        """Keep ``transfer``'s Future open until the step's last bucket is done; return False if that was refused."""
        with self._lock:
            if not self._is_cut_short:
                self._held.append(transfer)
            return not self._is_cut_short

    def let_go(self, *, refused: bool = False) -> list[Any]:
        """Return what was held, once; ``refused``: the last bucket never goes, so hold nothing any more."""
        with self._lock:
            self._is_cut_short = refused
            held, self._held = self._held, []
        return held
