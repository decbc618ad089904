"""The stages of a journey are run by the engine and by the threads that step and read."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from crossover_ddp._decoupled.pending import Stages, next_stage
from crossover_ddp._engine.journeys import Gate


def drive(way: Any, ended: Callable[[], object]) -> None:
    """Run a journey as the engine does: each stop resumes it."""

    def resume() -> None:
        try:
            stop = way.send(None)
        except StopIteration:
            ended()
        else:
            stop(resume)

    resume()


def test_stages_run_in_order_and_receive_the_values_passed_to_them() -> None:
    log: list[str] = []
    gate = Gate()

    async def journey() -> None:
        await gate
        log.append("reduced")
        log.append(await next_stage())
        await next_stage()
        log.append("gathered")

    stages = Stages(journey)
    drive(stages.travel(), lambda: log.append("first stage ends"))
    assert log == []
    gate.open()
    stages.run("stepped")
    drive(stages.travel(), lambda: log.append("last stage ends"))
    assert log == ["reduced", "first stage ends", "stepped", "gathered", "last stage ends"]


def test_an_error_that_the_engine_throws_reaches_the_journey() -> None:
    caught: list[BaseException] = []

    async def journey() -> None:
        try:
            await Gate()
        except KeyError as error:
            caught.append(error)
            raise

    way = Stages(journey).travel()
    way.send(None)
    with pytest.raises(KeyError, match="lost"):
        way.throw(KeyError("lost"))
    assert len(caught) == 1


def test_an_error_of_a_stage_is_raised_on_the_thread_that_runs_it() -> None:
    async def journey() -> None:
        await next_stage()
        raise KeyError("no memory")

    stages = Stages(journey)
    stages.run()
    with pytest.raises(KeyError, match="no memory"):
        stages.run()


def test_close_ends_a_journey_between_two_stages_and_no_other() -> None:
    ended: list[str] = []
    gate = Gate()

    async def journey(name: str) -> None:
        try:
            await (gate if name == "travelling" else next_stage())
        finally:
            ended.append(name)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of coroutines that never ran
        for name in ("not begun", "between", "travelling"):
            stages = Stages(lambda name=name: journey(name))  # type: ignore[misc]
            if name == "between":
                stages.run()
            elif name == "travelling":
                drive(stages.travel(), lambda: None)
            stages.close()
            del stages
            gc.collect()
    assert ended == ["between"]
    gate.open()
    assert ended == ["between", "travelling"]
