"""A rank of the averaging states' campaign: trains, saves, and records each step and each error."""

import json
import os
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any, TextIO

import torch
import torch.distributed as dist

from crossover_ddp import CrossoverError, ExchangeError
from crossover_ddp.averaging_hooks import ElasticState, LocalSGDState
from tests.multiprocess.averaging_oracle import NESTEROV, Trainer
from tests.multiprocess.compressed_training import digest
from tests.multiprocess.identity_codec import Identity

LOCAL: dict[str, dict[str, int]] = {
    "blocking": {"sync_every": 2},
    "delayed": {"sync_every": 4, "delay": 3},
    "streamed": {"sync_every": 4, "delay": 1, "fragments": 4},
    "diloco": {"sync_every": 4, "delay": 2, "fragments": 2},
    "increments": {"sync_every": 1, "delay": 1},
}
ELASTIC = ("sync", "async", "wild")
START_S = 60.0
REBUILD = "RuntimeError in DDP"  # torch's own error, of collectives that no hook has made
EVERY = 2  # interval of the elastic states


def make_state(kind: str, group: Any) -> Any:
    if kind in LOCAL:
        outer = NESTEROV if kind == "diloco" else None
        codec = Identity() if kind == "increments" else None
        return LocalSGDState(**LOCAL[kind], outer_optimizer=outer, process_group=group, codec=codec)
    return ElasticState(EVERY, kind, process_group=group)  # type: ignore[arg-type]


class Life:
    """One rank from its start or its checkpoint to its end; see `averaging_campaign.Story`."""

    def __init__(self, order: dict[str, Any], group: Any, log: TextIO) -> None:
        self._order = order
        self._log = log
        self._rank = order["rank"]
        state = make_state(order["kind"], group)
        self._trainer = Trainer(self._rank, state, "sgd", process_group=group)
        if order["start"]:
            checkpoint = torch.load(order["start"], weights_only=True)
            self._trainer.model.module.load_state_dict(checkpoint["model"])
            state.load_state_dict(checkpoint["state"])
            self._trainer.steps = checkpoint["state"]["steps"]

    def live(self) -> None:
        """Train, save and end; or record the error, and whether it is raised again."""
        try:
            self._train()
        except CrossoverError as error:
            self._end(error, type(error).__name__)
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            if not any("_rebuild_buckets" in (frame.line or "") for frame in frames):
                raise
            self._end(error, REBUILD)

    def _end(self, error: Exception, name: str) -> None:
        again = self._raises_again(name)
        finite = bool(self._trainer.values.isfinite().all())
        self._record(raised=name, message=str(error)[:300], finite=finite, again=again)
        self._trainer.state.close()
        self._record(closed=True)

    def _train(self) -> None:
        trainer, state = self._trainer, self._trainer.state
        while trainer.steps < self._order["until"]:
            if self._order["poison"] == [self._rank, trainer.steps]:
                with torch.no_grad():
                    next(trainer.model.parameters()).view(-1)[0] = float("inf")
            trainer.step()
            self._record(step=trainer.steps, digest=digest([trainer.values]))
            time.sleep(self._order["pace_s"])
        state.average()
        rounds = state.rounds() if isinstance(state, ElasticState) else []
        self._record(averaged=digest([trainer.values]), rounds=rounds)
        checkpoint = {"model": trainer.model.module.state_dict(), "state": state.state_dict()}
        if self._rank == 0:
            torch.save(checkpoint, self._order["save"])
        state.close()
        dist.destroy_process_group()
        self._record(ended=True)

    def _raises_again(self, name: str) -> bool:
        """Return whether a further step and a further average raise the same error."""
        attempts = [self._trainer.step, self._trainer.state.average]
        # A further step would begin DDP's collectives again, while a peer is still in the old ones.
        if name == REBUILD:
            name, attempts = ExchangeError.__name__, attempts[1:]
        for attempt in attempts:
            try:
                attempt()
            except CrossoverError as error:
                if type(error).__name__ == name:
                    continue
            return False
        return True

    def _record(self, **what: Any) -> None:
        print(json.dumps(what), file=self._log)


def live(order: dict[str, Any]) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order['store']}",
        rank=order["rank"],
        world_size=order["world_size"],
        timeout=timedelta(seconds=START_S),
    )
    group = dist.new_group(timeout=timedelta(seconds=order["timeout_s"]))
    dist.barrier()  # on a busy machine ranks start at different times
    with open(order["log"], "w", buffering=1) as log:
        Life(order, group, log).live()
