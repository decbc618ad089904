"""The best order of a pipeline's step, proven by a constraint solver (OR-tools CP-SAT); whole numbers of seconds only."""

from collections import defaultdict
from typing import Any

from crossover_ddp.pipeline.model import Action, StagedChain


def proven_optimum_s(
    chain: StagedChain, *, start_s: float, seconds: float = 60.0, workers: int = 1
) -> float | None:
    """Return the length of the shortest step, or None if it was not proven in time.

    Devices and ports are used by one at a time, as in the simulator; any order of actions and of transfers is allowed.
    ``start_s`` is the length of a known step.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    horizon = int(start_s)
    used: dict[Any, list[Any]] = defaultdict(list)
    ends: dict[Action, Any] = {}
    length = model.new_int_var(int(chain.lower_bound_s()), horizon, "length")

    def interval(duration: float, users: tuple[Any, ...], after: list[Any]) -> Any:
        assert duration == int(duration)
        start = model.new_int_var(0, horizon, "")
        for user in users:
            used[user].append(model.new_fixed_size_interval_var(start, int(duration), ""))
        for end in after:
            model.add(start >= end)
        model.add(start + int(duration) <= length)
        return start + int(duration)

    last = len(chain.stages) - 1
    for micro in range(chain.microbatches):
        arrived: list[Any] = []
        for stage in range(last + 1):
            action = Action(stage, "F", micro)
            ends[action] = interval(chain.seconds(*action), (chain.device(stage, micro),), arrived)
            if stage < last:
                hop = chain.hop(stage, micro, back=False)
                arrived = [interval(hop.wire_s, hop.ports, [ends[action]]) if hop else ends[action]]
        arrived = []
        for stage in reversed(range(last + 1)):
            action = Action(stage, "B", micro)
            needs = [*arrived, ends[Action(stage, "F", micro)]]
            ends[action] = interval(chain.seconds(*action), (chain.device(stage, micro),), needs)
            if stage:
                hop = chain.hop(stage - 1, micro, back=True)
                arrived = [interval(hop.wire_s, hop.ports, [ends[action]]) if hop else ends[action]]
    for intervals in used.values():
        model.add_no_overlap(intervals)
    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    return solver.objective_value if status == cp_model.OPTIMAL else None
