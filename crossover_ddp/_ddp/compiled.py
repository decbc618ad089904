"""Keeps dynamo out of functions of this package, and has module hooks that it need not trace.

[Note: pieces] Where a model is compiled as a whole, torch's DDPOptimizer cuts its graph at the
boundaries of DDP's buckets, and passes each piece to the backend. A piece reads nothing but its
inputs. So `PieceBackend` notes the parameters among them whenever a piece is about to run, and a
region of compiled code (`Region`) is entered without waiting for all its parameters. This
holds only if no code runs between the pieces, that is, without a graph break.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch

from crossover_ddp._system.torch_private import graph_breaks, inductor_options, lookup_backend
from crossover_ddp.errors import UnsupportedConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Return ``function`` in a form that dynamo does not trace."""
    return cast(Function, torch.compiler.disable(function))


class OwnHook(functools.partial[None]):
    """A module hook that does nothing in a copy of the module.

    It is a partial, so that calling the hook itself runs no Python code of this package.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    return None


# --- pieces of a compiled model; see [Note: pieces] ------------------------------------------------


class Region:
    """A compiled module whose pieces report their parameters while it runs.

    Args:
        parameters: a function that returns the parameters that the module reads.
        reads: a function to call with parameters that a piece is about to read.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]],
        reads: Callable[[list[torch.Tensor]], None],
    ) -> None:
        # Whether the region may be entered before its parameters are updated.
        self.is_in_pieces = False
        self._parameters = parameters
        self._reads = reads
        self._own: set[int] = set()
        # The ids of the parameters that pieces have read since the region was entered, by piece.
        self._read: dict[object, set[int]] = {}
        # The number of graph breaks when it was entered, and before the pieces were compiled.
        self._breaks = 0
        self._breaks_before = 0
        self._has_pending = False

    def enter(self, *, has_pending: bool) -> None:
        """Note that the region begins to run. ``has_pending`` is True if updates wait for pieces."""
        self._own = {id(p) for p in self._parameters() if p.requires_grad}
        self._read = {}
        self._breaks = graph_breaks()
        self._breaks_before = self._breaks
        self._has_pending = has_pending
        _running.region = self

    def note(self, piece: "PieceBackend", key: object, arguments: Iterable[object]) -> None:
        """Note that a piece is about to run, with these arguments."""
        found = [each for each in arguments if id(each) in self._own]
        if found:
            self._read[key] = {*map(id, found)}
            self._breaks_before = min(self._breaks_before, piece.breaks_before)
            self._reads(cast(list[torch.Tensor], found))

    def leave(self) -> None:
        """Note that the region has run, and decide whether it may be entered early next time.

        Raises ``UnsupportedConfigurationError`` if it was, and other code than pieces has run.
        """
        if _running.region is not self:
            return
        _running.region = None
        if self._has_pending and (graph_breaks() > self._breaks or not self._read):
            self.is_in_pieces = False
            raise UnsupportedConfigurationError(
                "a model that was compiled in pieces ran other code, which may have read "
                "parameters before their update (a graph break after recompilation, or more "
                "recompilations than torch allows); compile it without crossover_ddp.compiled"
            )
        covered = set[int]().union(*self._read.values())
        is_whole = graph_breaks() == self._breaks_before
        self.is_in_pieces = is_whole and len(self._read) > 1 and covered >= self._own


class _Running(threading.local):
    """The region that this thread runs."""

    region: Region | None = None


_running = _Running()


class PieceBackend:
    """A backend of ``torch.compile`` whose graphs report the parameters that they read.

    Args:
        backend: the name of a backend, or a function like one, that compiles each graph.
    """

    def __init__(self, backend: str | Callable[..., Any]) -> None:
        self._compile = lookup_backend(backend)
        self._is_inductor = backend == "inductor"
        # A graph break since then may be one of the model.
        self.breaks_before = graph_breaks()

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any
    ) -> Callable[..., Any]:
        if self._is_inductor:
            options = self._for_inductor(**options)
        run = self._compile(graph, inputs, **options)
        kept = [*graph.parameters()]  # none if dynamo makes parameters inputs, as usual
        key = object()

        @uncompiled
        def run_piece(*arguments: Any) -> Any:
            if (region := _running.region) is not None:
                region.note(self, key, (*arguments, *kept))
            return run(*arguments)

        return run_piece

    @staticmethod
    def _for_inductor(
        mode: str | None = None, options: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return the options of ``torch.compile`` as inductor's function expects them."""
        of_mode = inductor_options(mode) if mode else {}
        return {**more, "config_patches": {**of_mode, **(options or {})}}
