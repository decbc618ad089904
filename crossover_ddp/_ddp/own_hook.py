"""A hook of a module that does not follow the module into its copies."""

from collections.abc import Callable
from typing import Any


class OwnHook:
    """A hook of a module, for this module only: a copy gets one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call it, if there is anything to call."""
        if self._call is not None:
            self._call(*args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, ()
