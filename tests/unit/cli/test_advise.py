"""`crossover-ddp advise`: predictions from figures, measurements, refusals, no processes left."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp import cli
from crossover_ddp.cli import advise as cli_advise
from crossover_ddp.cli import step_meter
from crossover_ddp.cli.advise import DECOUPLED, METHODS, Figures, figures, methods_for, verdict
from tests.harness import in_ranks
from tests.harness.waiting import eventually, gone

ROOT = Path(__file__).resolve().parents[3]
STEPS = step_meter.WARM_UP_STEPS + 4 * step_meter.BLOCK_STEPS


def of(compute_s: float, exposed_s: float, wire_s: float) -> Figures:
    return Figures(compute_s, exposed_s, wire_s, 4e6, 2)


@pytest.mark.parametrize(
    ("found", "bounds", "what"),
    [
        (of(1.0, 0.04, 0.5), [1.04] * 4, "do not bother: communication costs only 3.8%"),
        (of(1.0, 0.08, 1.0), [1.08, 1.0, 1.08, 1.08], "do not bother: none of these"),
        (
            of(1.0, 0.5, 1.0),
            [1.5, 1.286, 1.5, 1.5],
            "crossover (two sibling jobs): 1.46× expected, 1.50× at best",
        ),
        # The wire limits.
        (of(1.0, 2.0, 2.5), [1.2, 1.2, 1.895, 3.0], "crossover (two sibling jobs): 1.16×"),
        (of(0.2, 2.0, 2.2), [1.0, 1.0, 1.886, 3.445], "a codec, Int8(): 3.10× expected"),
        (of(1.0, 1.3, 2.2), [1.045, 1.045, 1.605, 2.3], "a codec, Int8(): 2.07×"),
        # M beyond C + N is noise.
        (of(1.0, 0.2, 1.8), [1.0, 1.0, 1.0, 1.2], "a codec, Int8(): 1.08×"),
    ],
)
def test_bounds_and_verdict_follow_from_c_n_and_m(
    found: Figures, bounds: list[float], what: str
) -> None:
    assert [each.bound(found) for each in METHODS] == pytest.approx(bounds, rel=1e-3)
    assert DECOUPLED.expected(found) == pytest.approx(0.93 * bounds[1], rel=1e-3)
    assert verdict(found).startswith(what)
    shown = cli_advise._report(found)
    assert shown.endswith(f"→ {verdict(found)}\n")
    assert ("register_comm_hook" in shown) == (not what.startswith("do not"))
    assert "(67% backward, assumed)" in shown
    assert "(60% backward)" in cli_advise._report(found._replace(backward_share=0.6))


def test_the_table_has_the_rows_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    """They are M/C, and the bounds of siblings, decoupled training, fp16 and Int8."""
    text = (ROOT / "docs" / "choosing.md").read_text()
    written = re.findall(r"^\| ([\d.]+)" + r" \| ([\d.]+)" * 4 + r" \|", text, re.MULTILINE)
    assert len(written) == 7
    words = ["advise", "--link", "10gbit", "--ranks", "8", "--model"]
    assert [cli.main([*words, size]) for size in ("102.4MB", "25.6M")] == [0, 0]
    shown = capsys.readouterr().out.splitlines()
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
    assert "M 143 ms: 102 MB of gradients, 8 ranks, 10 Gbit/s" in "\n".join(shown)
    rows = shown[4 : len(shown) // 2]
    for row, (ratio, *single, pair) in zip(rows, written, strict=True):
        cells = re.findall(r"^[\d.]+|(?<=\()[\d.]+", row)
        assert [*map(float, cells)] == pytest.approx(
            [*map(float, (ratio, pair, *single))], abs=0.006
        )


def test_nodes_with_several_ranks_send_less_with_the_hooks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two nodes of eight: each sends its gradients once, where a ring sends them 1.875 times."""
    words = ["advise", "--link", "25gbit", "--ranks", "16", "--model", "1200MB", "--nodes"]
    assert cli.main([*words, "2"]) == 0
    assert "M 720 ms: 1.2e+03 MB of gradients, 16 ranks on 2 nodes (M 384 ms with the hooks)" in (
        capfd.readouterr().out
    )
    assert cli.main([*words, "3"]) == 1
    assert "16 ranks on 3 nodes" in capfd.readouterr().err
    flat = of(1.0, 2.33, 3.0)._replace(ranks=16)
    two = flat._replace(nodes=2)
    assert two.hooks_wire_s == pytest.approx(3.0 * 8 / 15)
    assert flat.hooks_wire_s == flat._replace(nodes=16).hooks_wire_s == 3.0
    assert METHODS[2].bound(two) == METHODS[2].bound(flat), "torch's own hook sends as before"
    assert all(each.bound(two) > each.bound(flat) for each in (DECOUPLED, METHODS[-1]))


@pytest.mark.parametrize(
    ("micro_batches", "wire_s", "bound"),
    [(1, 3.0, 4 / 3.5), (4, 3.0, 13 / 12.5), (4, 12.0, 22 / 21), (4, 2.0, 1.0)],
)
def test_only_the_last_backward_and_the_first_forward_hide_communication(
    micro_batches: int, wire_s: float, bound: float
) -> None:
    """A micro-batch takes 1 s for forward and 2 s for backward."""
    compute_s = 3.0 * micro_batches
    exposed_s = max(0.0, wire_s - 2.0)
    found = Figures(compute_s, exposed_s, wire_s, 4e6, 2, 2.0 / compute_s, micro_batches)
    assert DECOUPLED.bound(found) == pytest.approx(bound)
    assert found.behind_backward_s(wire_s / 2) == pytest.approx(compute_s - 2.0 + wire_s / 2)


def test_a_rehearsal_gives_the_expectation() -> None:
    """It may be below 1: the processor time of messages can cost more than is hidden."""
    found = of(0.004, 0.002, 0.004)._replace(
        rehearsed={"whole": 0.007, "deferred": 0.009, "half": 0.0065, "int8": 0.001}
    )
    _, decoupled, half, int8 = [each.expected(found) for each in METHODS]
    assert decoupled == pytest.approx(6 / 8)
    assert half == pytest.approx(6 / 5.5)
    assert int8 == METHODS[-1].bound(found)  # a rehearsal that promises more is noise
    assert METHODS[1].pays_from(found) == pytest.approx(1.05 * 8 / 4 - 1)
    assert verdict(found).startswith("crossover")
    assert verdict(found._replace(exposed_s=0.0001)).endswith("N/C 0.03; nothing pays below 0.05")


def test_what_the_script_uses_is_named_with_its_effect_on_each_line() -> None:
    found = of(1.0, 0.5, 1.0)._replace(seen=("GradScaler", "accumulation"), forwards=2.0)
    shown = cli_advise._report(found)
    assert "the script uses GradScaler\n    decoupled training: steps stay deferred\n" in shown
    assert "the script uses accumulation (2 micro-batches)\n    decoupled training: hides" in shown
    assert "loss_scale=scaler.get_scale" in shown
    assert "N/C 0.50, M/C 1.00" in shown


def even() -> list[nn.Module]:
    return [nn.Linear(1024, 1024) for _ in range(32)]


def frozen() -> nn.Module:
    return nn.Sequential(nn.ReLU())


def nothing() -> None:
    """Return no model."""


NEITHER_OR_BOTH = "expected -- COMMAND, or --link, --model and --ranks, got"
LINK, NO_MODEL = (
    "--link 10gbit --ranks 8 --model",
    "expected a size such as 102MB, timm:NAME, torchvision:NAME or",
)


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (
            f"{LINK} torchvision:resnet50",
            0,
            "102 MB of 161 gradients of torchvision:resnet50, 8 ranks",
        ),
        (f"{LINK} timm:resnet50", 0, "102 MB of 161 gradients of timm:resnet50, 8 ranks"),
        (f"{LINK} {__name__}:even", 0, f"134 MB of 64 gradients of {__name__}:even, 8 ranks"),
        *((f"{LINK} {__name__}:{name}", 1, NO_MODEL) for name in ("gone", "nothing")),
        (f"{LINK} {__name__}:frozen", 1, "a model with parameters that are trained"),
        ("", 2, NEITHER_OR_BOTH),
        ("--link 1gbit", 2, NEITHER_OR_BOTH),
        ("--link 1gbit --model 1M --ranks 2 -- true", 2, NEITHER_OR_BOTH),
        *(
            (words, 2, "expected a")
            for words in ("--link 10", "--link 0gbit", "--model x", "--ranks 1")
        ),
        (f"-- true {'x' * 200_000}", 1, "Argument list too long"),
    ],
)
def test_models_are_built_by_name_and_wrong_arguments_are_refused(
    words: str, code: int, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for library in ("timm", "torchvision") if ":resnet" in words else ():
        pytest.importorskip(library, reason="torchvision and timm are in the extra 'recipes'")
    try:
        found = cli.main(["advise", *words.split()])
    except SystemExit as error:  # wrong usage
        found = error.code
    assert (found, what in "".join(capfd.readouterr())) == (code, True)


def block(
    apart: bool,
    step_s: float,
    met_s: float = 0.0,
    wire_s: float = 0.0,
    ranks: int = 2,
    backward_s: float = 0.0,
) -> dict[str, Any]:
    took_s = {"step_s": step_s, "backward_s": backward_s, "met_s": met_s, "wire_s": wire_s}
    counted = {"forwards": 1.0, "processor_s": 1.0, "ready": [[4e6, 0.0]], "seen": []}
    job = {"ranks": ranks, "nodes": ranks, "sharded": False, "bytes": 4e6}
    return {"apart": apart, **job, **counted, **took_s}


def record(directory: Path, *ranks: list[dict[str, Any]]) -> Path:
    for number, blocks in enumerate(ranks):
        text = "".join(json.dumps(each) + "\n" for each in blocks)
        (directory / f"rank-{number}.jsonl").write_text(text + '{"apart": tr')
    return directory


def test_the_slowest_rank_gives_c_and_waits_for_peers_do_not_count(tmp_path: Path) -> None:
    early = [block(False, 2.0), block(True, 2.7, met_s=0.5, wire_s=1.2)]
    late = [block(False, 2.0), block(True, 2.7, met_s=0.1, wire_s=1.1)]
    found = figures(record(tmp_path, early, late))
    assert found[:7] == pytest.approx((1.5, 0.5, 1.1, 4e6, 2, 2 / 3, 1.0))
    assert (found.seen, found.rehearsed) == ((), {})
    early[1]["backward_s"], late[1]["backward_s"] = 0.4, 0.6  # of 1.0 and 1.5
    assert figures(record(tmp_path, early, late)).backward_share == pytest.approx(0.4)
    alone = [block(apart, 1.0, ranks=1) for apart in (False, True)]
    for rank, what in (
        ([], "DistributedDataParallel"),
        (early[:1], "17 steps"),
        (alone, "at least two ranks"),
    ):
        with pytest.raises(ValueError, match=what):
            figures(record(tmp_path, rank, rank))


def watched(directory: Path) -> type[DistributedDataParallel]:
    """Return a subclass of DDP that is measured. DDP itself stays as it is for other tests."""
    step_meter._HERE = str(directory)
    kind = type("Watched", (DistributedDataParallel,), {})
    step_meter._watch(kind)
    return kind


def recorded(directory: Path) -> list[dict[str, Any]]:
    """Return the blocks of this rank."""
    return [
        json.loads(line)
        for line in (directory / f"rank-{dist.get_rank()}.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(("count", "chained"), [(1, False), (2, False), (2, True)])
@in_ranks(2, timeout_s=30.0)
def test_a_measured_job_trains_as_plain_ddp(
    tmp_path: Path, rank: int, count: int, chained: bool
) -> None:
    """Also with two models: DDP waits for the buckets of each one at the end of its backward.

    Steps are those of the first model.
    """
    sums = []
    for kind in (watched(tmp_path), DistributedDataParallel):
        torch.manual_seed(1)
        nets = [nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]) for _ in range(count)]
        models = [kind(net, bucket_cap_mb=0.0005) for net in nets]
        if kind is not DistributedDataParallel:
            models[0].register_comm_hook(None, lambda state, bucket: None)  # is not run
        parameters = [parameter for net in nets for parameter in net.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        for step in range(STEPS):
            inputs = torch.full((2, 8), rank + step / STEPS)
            if chained and step:  # one backward, in which the other model's buckets are sent first
                models[1](models[0](inputs)).square().mean().backward()
            else:
                for model in models:
                    model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sums.append(sum(parameter.detach().double().sum().item() for parameter in parameters))
        if count == 2:
            # A saved model must not contain the meter.
            assert b"_Meter" not in pickle.dumps(vars(models[1])["_comm_hooks"])
    assert sums[0] == sums[1]
    blocks = recorded(tmp_path)
    assert [each["apart"] for each in blocks] == [False, True, False, True]
    for each in blocks:
        assert (each["bytes"], each["ranks"]) == (count * 4 * (64 + 8) * 4, 2)
        assert (
            (each["wire_s"] > 0) == (each["met_s"] > 0) == (each["backward_s"] > 0) == each["apart"]
        )
        assert each["backward_s"] + each["met_s"] + each["wire_s"] < each["step_s"]


@in_ranks(2, timeout_s=30.0)
def test_a_model_that_trains_after_another_is_measured(tmp_path: Path, rank: int) -> None:
    """The first one stops within a block in which buckets are held back."""
    kind = watched(tmp_path)
    first_steps = step_meter.WARM_UP_STEPS + step_meter.BLOCK_STEPS + 2
    for width, steps in ((8, first_steps), (4, step_meter._PATIENCE + STEPS)):
        model = kind(nn.Linear(width, width))
        for _ in range(steps):
            model(torch.ones(2, width)).mean().backward()
    assert [block["apart"] for block in recorded(tmp_path)] == [False, False, True, False, True]
    assert [block["bytes"] for block in recorded(tmp_path)] == [4 * (64 + 8)] + 4 * [4 * (16 + 4)]


@in_ranks(2, timeout_s=60.0)
def test_a_job_of_fsdp2_trains_as_without_the_meter(tmp_path: Path) -> None:
    """Steps are those with exchanges between nodes, here of one rank each."""
    step_meter._HERE = str(tmp_path)
    (tmp_path / step_meter.BLOCKS).write_text("2")
    step_meter._blocks_wanted.cache_clear()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("between", "inside"))
    meter = step_meter._ShardedMeter()
    sums = []
    for is_measured in (True, False):
        with contextlib.ExitStack() as patches:
            if is_measured:
                ends = "_root_post_backward_final_callback"
                patches.enter_context(mock.patch.object(FSDPState, ends, getattr(FSDPState, ends)))
                step_meter._watch_states(FSDPState, meter)
                collectives = step_meter._Collectives(meter.all_reduce)
                patches.enter_context(mock.patch.object(_fsdp_collectives, "dist", collectives))
            torch.manual_seed(1)
            model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(2 * STEPS):
                model.set_requires_all_reduce(bool(step % 2))
                model(torch.full((2, 8), dist.get_rank() + step / STEPS)).square().mean().backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        sums.append(sum(each.detach().to_local().sum().item() for each in model.parameters()))
    step_meter._blocks_wanted.cache_clear()
    assert sums[0] == sums[1]
    blocks = [line for line in recorded(tmp_path) if "apart" in line]
    assert [each["apart"] for each in blocks] == [False, True, False, True]
    for each in blocks:
        assert (each["bytes"], each["ranks"], each["nodes"]) == (4 * 2 * (64 + 8), 2, 2)
        assert (each["sharded"], each["forwards"]) == (True, 2.0)
        assert (each["wire_s"] > 0) == (each["met_s"] > 0) == each["apart"]
        assert each["met_s"] + each["wire_s"] < each["step_s"]
    assert {"rehearsed": None} in recorded(tmp_path)  # so that `advise` waits for none


def test_advice_for_fsdp2_is_of_the_hop_between_nodes() -> None:
    found = of(1.0, 1.0, 1.0)._replace(ranks=8, nodes=2, sharded=True)
    assert found.hooks_wire_s == 1.0, "M was measured on this hop"
    crossover, split, int8 = methods_for(found)
    assert split.bound(found) == pytest.approx(2 / (1 / 3 + 1))
    assert int8.bound(found) == pytest.approx(2.0)
    assert 'process_group=mesh["between"].get_group()' in crossover.line
    shown = cli_advise._report(found)
    for method in (crossover, split, int8):
        assert f"{method.caveat}\n    crossover_ddp.fsdp.register_comm_hook(" in shown
    assert verdict(found).startswith("crossover (two sibling jobs)")


class Takes(torch.autograd.Function):
    """Advances a clock: forward takes a second, backward three."""

    now_s = 0.0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        Takes.now_s += 1.0
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Takes.now_s += 3.0
        return gradient


@in_ranks(2, timeout_s=30.0)
def test_the_share_of_backward_is_measured_with_accumulated_gradients(
    tmp_path: Path, rank: int
) -> None:
    """Only the last backward can hide communication. A forward that does not train is ignored."""
    model = watched(tmp_path)(nn.Linear(4, 4))
    with mock.patch.object(step_meter, "_now_s", lambda device: Takes.now_s):
        for _ in range(STEPS):
            with model.no_sync():
                model(Takes.apply(torch.ones(2, 4))).mean().backward()
            loss = Takes.apply(model(Takes.apply(torch.ones(2, 4)))).mean()
            with torch.no_grad():
                model(Takes.apply(torch.ones(2, 4)))
            loss.backward()
            Takes.now_s += 1.0  # the optimizer
    apart = [each for each in recorded(tmp_path) if each["apart"]]
    assert [(each["step_s"], each["backward_s"]) for each in apart] == [(8.0, 5.0)] * 2
    assert [each["forwards"] for each in recorded(tmp_path)] == [2.0] * 4


class Average(nn.Module):
    """Looks like an EMA of any library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


class ModelEmaV9(Average):
    """A moving average."""


class AttentionEMA(nn.Module):
    """A layer, which is no moving average."""


def test_what_a_script_uses_is_seen() -> None:
    model = nn.Sequential(AttentionEMA(), nn.Linear(2, 2))
    ddp = Average(model)
    with mock.patch.object(step_meter, "_noted", set[str]()):
        before = {*step_meter._seen(ddp)}
        kept: list[object] = [ModelEmaV9(nn.Linear(2, 2)), torch.amp.GradScaler("cpu")]
        clipping = mock.Mock(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
        step_meter._note_clipping(clipping)
        assert {*step_meter._seen(ddp)} - before == {"EMA"}  # scaler and clipping are not used
        kept[1].scale(torch.ones(1))  # type: ignore[attr-defined]
        clipping.clip_grad_norm_(model.parameters(), 1.0)
        compiled = torch.compile(ddp, backend="eager")
        assert compiled is not None
        assert {*step_meter._seen(ddp)} - before == {
            "EMA",
            "GradScaler",
            "clipping",
            "torch.compile",
        }


@in_ranks(2, timeout_s=60.0)
def test_each_way_is_rehearsed_after_the_last_block(tmp_path: Path, rank: int) -> None:
    """The job goes on, with equal parameters, and is measured as before."""
    (tmp_path / step_meter.BLOCKS).write_text("2")
    step_meter._blocks_wanted.cache_clear()
    sums = []
    sent = 0
    send = step_meter._Meter._send

    def counted(self: Any, *bucket: Any) -> None:
        nonlocal sent
        sent += 1
        send(self, *bucket)

    step_meter._Meter._send = counted  # type: ignore[method-assign]
    for kind in (watched(tmp_path), DistributedDataParallel):
        torch.nn.parallel.DistributedDataParallel = kind  # for the stubs as well
        torch.manual_seed(1)
        model = kind(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(STEPS):
            model(torch.full((2, 8), rank + step / STEPS)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sums.append(
            sum(parameter.detach().double().sum().item() for parameter in model.parameters())
        )
    assert sums[0] == sums[1]
    lines = recorded(tmp_path)
    assert ["apart" in line for line in lines] == [True, True, False, True]
    assert {*lines[2]["rehearsed"]} == {"whole", "deferred", "half", "int8"}
    assert min(lines[2]["rehearsed"].values()) > 0
    assert sent == STEPS  # the stubs have the hooks of their ways
    step_meter._Meter._send = send  # type: ignore[method-assign]


class MixedPrecision:
    """Registers a hook in its constructor, as DDP does with ``mixed_precision=``."""

    def __init__(self) -> None:
        self._comm_hooks: list[tuple[object, object]] = []
        self.run: list[object] = []
        self.register_comm_hook("state", "casts gradients")

    def register_comm_hook(self, state: object, hook: object) -> None:
        self._comm_hooks.append((hook, state))
        self.run.append(hook)

    def _pre_forward(self, *inputs: object) -> object:
        return inputs

    def _post_forward(self, output: object) -> object:
        return output


def test_ddps_own_hook_runs_and_that_of_the_script_is_only_listed() -> None:
    step_meter._watch(MixedPrecision)
    model = MixedPrecision()
    model.register_comm_hook("own", "the script's")
    assert model._comm_hooks == [("casts gradients", "state"), ("the script's", "own")]
    assert model.run == ["casts gradients"]


@pytest.mark.parametrize("measured", [False, True])
def test_the_last_lines_of_a_failed_command_are_shown(
    measured: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; print('all is well'); sys.exit('no such data set')"
    if measured:
        blocks = "\n".join(json.dumps(block(apart, 1.0)) for apart in (False, True))
        here = "os.environ['PYTHONPATH'].split(':')[0]"
        script = f"import os; open({here} + '/rank-0.jsonl', 'w').write({blocks!r}); {script}"
    assert cli.main(["advise", "--", sys.executable, "-c", script]) == (not measured)
    errors = capfd.readouterr().err
    assert "the command ended with 1" in errors
    assert "    no such data set" in errors


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.own = 1")
    path = cli_advise.measuring(tmp_path / "meter")["PYTHONPATH"]
    code = "import sys; print(sys.own, sys.meta_path[0].__class__.__name__)"
    environment = {**os.environ, "PYTHONPATH": f"{path}:{own}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("1 _Finder\n", "")


# Its child has left the session, as torchrun's workers do. Both ignore SIGTERM.
STUBBORN = "trap '' TERM; setsid sleep 99 & echo $! >$0; sleep 99; sleep 99"
IMPATIENT = """
from crossover_ddp.cli import jobs, main
jobs._GRACE_AFTER_S = 0.5
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    ("number", "command", "more"),
    [
        (signal.SIGINT, "advise", []),
        (signal.SIGTERM, "advise", []),
        (signal.SIGINT, "compare", ["--", "true"]),
    ],
)
def test_a_signal_ends_the_measured_job(
    number: signal.Signals, command: str, more: list[str], tmp_path: Path
) -> None:
    noted = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, command, "--", "bash", "-c", STUBBORN, str(noted), *more],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    try:
        assert eventually(lambda: noted.exists() and noted.read_text() != "")
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    assert gone(int(noted.read_text()))
    assert [each.name for each in tmp_path.iterdir()] == ["pid"]
