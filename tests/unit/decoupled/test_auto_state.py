"""`AutoState` on one rank: arguments, the verdict's line, statistics, and checkpoints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Muon

from crossover_ddp import (
    AutoState,
    CompressedState,
    DecoupledState,
    Half,
    Int8,
    PowerSGD,
    UnsupportedConfigurationError,
    auto_hook,
    decoupled_hook,
)
from tests.harness.oracles import error_of
from tests.harness.training import Training

pytestmark = pytest.mark.usefixtures("process_group")

ALL = (
    "whole",
    "whole, small buckets",
    "deferred",
    "whole, Half()",
    "deferred, Half()",
    "whole, Int8()",
)
NOTHING_GAINED = 20  # passes until the verdict, where nothing can be gained


def auto(**options: Any) -> Any:
    return lambda model, optimizers, mutex: (AutoState(optimizers[0], **options), auto_hook)


def optimizer(kind: Callable[..., Any] = SGD) -> Any:
    return kind([torch.nn.Parameter(torch.zeros(3, 3))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"losses": "equal"}, ValueError, "losses='same', 'rounded' or 'any', got losses='equal'"),
        ({"arms": ("deferred, Half()",)}, ValueError, r"losses='rounded' or 'any' for arms"),
        (
            {"arms": ("whole, PowerSGD()",), "losses": "rounded"},
            ValueError,
            r"got arms=\('whole, PowerSGD\(\)',\)",
        ),
        ({"arms": ("hole",), "losses": "rounded"}, ValueError, r"whole.*got arms=\('hole',\)"),
        ({"arms": "whole"}, ValueError, "got arms='whole'; pass a sequence"),
        ({"arms": ()}, ValueError, r"got arms=\(\)"),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, "got model=Linear"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"expected .*?{text}"):
        AutoState(optimizer(), **options)


def test_an_optimizer_that_cannot_be_taken_in_parts_is_refused() -> None:
    class Normed(SGD):
        def step(self, closure: Any = None) -> Any:
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_([g for g in grads if g is not None], 1.0)
            norm = sum(float(g.norm()) for g in grads if g is not None)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(norm * parameter.grad)

    with pytest.raises(UnsupportedConfigurationError):
        AutoState(optimizer(Normed))
    with pytest.raises(UnsupportedConfigurationError, match="expected one optimizer, got 2"):
        AutoState([optimizer(), optimizer(Muon)])


def test_other_states_are_refused_by_the_hook() -> None:
    training = Training(lambda model, opts, mutex: (DecoupledState(opts[0]), auto_hook))
    assert "expected a AutoState, got state=DecoupledState" in error_of(training.step)
    training = Training(lambda model, opts, mutex: (CompressedState(None), auto_hook))
    assert "got state=CompressedState" in error_of(training.step)


def test_arms_are_sorted_and_a_single_one_is_chosen_from_the_start() -> None:
    names = ("deferred, Int8()", "whole, Half()", "whole")
    state = AutoState(optimizer(), losses="rounded", arms=names)
    assert [arm.name for arm in state._race.arms] == [*reversed(names)]
    assert [arm.rate for arm in state._race.arms] == pytest.approx([1.0, 0.5, 0.26], rel=0.05)
    assert (state.chosen, state.deferring, state.codec, state.figures) == (None, None, None, {})
    state = AutoState(optimizer(), losses="rounded", arms=names[:1])
    assert (state.chosen, state.deferring, state.codec) == ("deferred, Int8()", True, Int8())
    state = AutoState(optimizer(), losses="rounded")
    assert [arm.name for arm in state._race.arms][:-1] == [*ALL]
    rounded = state._race.arms
    state = AutoState(optimizer(), losses="any")
    assert state._race.arms[:-1] == rounded
    assert state._race.arms[-1].name == "whole, PowerSGD()"
    assert state._race.arms[-1].codec == PowerSGD()


@pytest.mark.parametrize("losses", ["same", "rounded", "any"])
def test_one_rank_chooses_whole_at_once_and_a_line_on_stderr_names_it(
    losses: str, capfd: pytest.CaptureFixture[str]
) -> None:
    training, plain = Training(auto(losses=losses)), Training(None)
    assert training.run(NOTHING_GAINED).state.chosen == "whole"
    assert training.state.deferring is False
    assert torch.equal(training.values, plain.run(NOTHING_GAINED).values)
    err = capfd.readouterr().err
    assert err.startswith(
        "crossover_ddp: chose whole: no other is 2 % faster than whole, after 10 "
    )
    assert err.count("\n") == 1
    assert {*training.state.figures} == {"whole", "C", "N", "M"}
    stats = training.state.stats()
    assert stats["codec"] is None
    assert stats["not_deferred_because"] == "the model is plain DDP, without a hook"
    training.close()


def test_a_checkpoint_keeps_the_choice() -> None:
    training = Training(auto(losses="rounded", arms=("deferred, Int8()",))).run()
    saved = training.state.checkpoint()
    assert saved["hook"]["arm"] == "deferred, Int8()"
    training.close()
    for options, chosen in (
        ({"losses": "rounded"}, "deferred, Int8()"),
        ({"losses": "same"}, None),
        ({"losses": "rounded", "arms": ("whole, Half()",)}, "whole, Half()"),
    ):
        resumed = Training(auto(**options))
        resumed.state.restore(saved)
        assert resumed.state.chosen == chosen
        assert resumed.state.deferring is (None if chosen is None else chosen.startswith("def"))
        resumed.run(2).close()
    assert resumed.state.codec == Half()
    fixed = Training(
        lambda model, opts, mutex: (DecoupledState(opts[0], codec=Int8()), decoupled_hook)
    )
    fixed.state.restore(saved)
    fixed.run(2).close()
    with pytest.raises(ValueError, match="expected a state dict"):
        AutoState(optimizer()).load_state_dict({"hands": 2})
