"""Where sibling jobs meet: ports of their own, what the user has said stays, common ones are refused."""

import itertools
from collections.abc import Mapping, Sequence

import pytest

from crossover_ddp.cli.run.commands import CommandError, from_groups, named
from crossover_ddp.cli.run.ports import Rendezvous, rendezvous


def meet(*texts: str, at_once: int = 2, **inherited: str) -> list[Rendezvous]:
    commands = named(from_groups([[text] for text in texts]))
    ports = itertools.count(80000)  # each twice
    return rendezvous(commands, inherited, lambda: next(ports) // 2, at_once=at_once)


def words_of(*texts: str, **inherited: str) -> list[str]:
    return [" ".join(each.words) for each in meet(*texts, **inherited)]


def test_torchrun_on_one_node_chooses_a_free_port() -> None:
    assert words_of("torchrun --nproc-per-node 2 x.py --lr 1", "venv/bin/torchrun x.py") == [
        "torchrun --standalone --nproc-per-node 2 x.py --lr 1",
        "venv/bin/torchrun --standalone x.py",
    ]


@pytest.mark.parametrize(
    "launcher", ["python -m torch.distributed.run", "numactl -N 0 torchrun", "env A=1 torchrun"]
)
def test_torchrun_is_found_where_it_stands(launcher: str) -> None:
    assert words_of(f"{launcher} x.py") == [f"{launcher} --standalone x.py"]


def test_the_older_launcher_is_known() -> None:
    launcher = "python3 -m torch.distributed.launch"
    assert words_of(f"{launcher} --use-env x.py") == [f"{launcher} --standalone --use-env x.py"]


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --standalone x.py",
        "torchrun --master-port 1234 x.py",
        "torchrun --master_port=1234 x.py",
        "torchrun --rdzv-backend c10d --rdzv-endpoint host:1234 --nnodes 2 x.py",
        "torchrun --rdzv-endpoint=host:1234 x.py",
    ],
)
def test_what_the_user_has_said_stays(text: str) -> None:
    assert words_of(text) == [text]


def test_a_c10d_rendezvous_without_a_place_gets_a_free_port() -> None:
    assert words_of("torchrun --rdzv-backend=c10d x.py") == [
        "torchrun --rdzv-endpoint=localhost:0 --rdzv-backend=c10d x.py"
    ]
    with pytest.raises(CommandError, match="a: expected a port for 1:2 nodes, got none"):
        words_of("torchrun --rdzv-backend=c10d --nnodes 1:2 x.py")


def test_jobs_on_several_nodes_must_name_a_port() -> None:
    with pytest.raises(CommandError, match="a: expected a port for 2 nodes, got none; add --master-port"):
        words_of("torchrun --nnodes 2 --master-addr host x.py")
    named = "torchrun --nnodes 2 --master-addr host --master-port 29501 x.py"
    assert words_of(named) == [named]


@pytest.mark.parametrize(
    "texts",
    [
        ["torchrun --master-port 7 x.py", "torchrun --master_port=7 y.py"],
        ["torchrun --master-port 7 x.py", "torchrun --rdzv-endpoint localhost:7 y.py"],
        ["torchrun --rdzv-backend c10d --rdzv-endpoint h x.py"] * 2,
        ["MASTER_PORT=7 python x.py", "torchrun --master-port 7 y.py"],
        ["torchrun --rdzv-backend etcd --rdzv-endpoint h:7 x.py"] * 2,
        ["PET_MASTER_PORT=7 torchrun x.py", "torchrun --master-port 7 y.py"],
    ],
)
def test_a_common_place_is_refused(texts: Sequence[str]) -> None:
    with pytest.raises(CommandError, match="for both a and b"):
        meet(*texts)
    assert len(meet(*texts, at_once=1)) == len(texts)


@pytest.mark.parametrize(
    "texts",
    [
        ["torchrun --nnodes 2 --master-addr one --master-port 7 x.py", "torchrun --master-port 7 x.py"],
        [f"torchrun --rdzv-backend etcd --rdzv-endpoint h:7 --rdzv-id {name} x.py" for name in "ab"],
        ["torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 x.py"] * 2,
    ],
)
def test_different_places_are_taken_as_they_are(texts: Sequence[str]) -> None:
    assert words_of(*texts) == list(texts)


def test_a_port_that_all_inherit_is_no_port_of_their_own() -> None:
    with pytest.raises(CommandError, match="for both a and b"):
        meet("torchrun x.py", "torchrun y.py", PET_MASTER_PORT="7")


def environments(*texts: str, **inherited: str) -> list[Mapping[str, str]]:
    return [each.environment for each in meet(*texts, **inherited)]


def test_other_programs_get_master_port() -> None:
    found = environments("python x.py", "MASTER_PORT=40001 python y.py", "bash -c 'torchrun x.py'")
    assert found == [{"MASTER_PORT": "40000"}, {}, {"MASTER_PORT": "40001"}]


def test_an_inherited_master_port_is_counted_on() -> None:
    assert environments("x", "y", "torchrun --master-port 400 z.py", MASTER_PORT="300") == [
        {"MASTER_PORT": "300"},
        {"MASTER_PORT": "301"},
        {},
    ]
    with pytest.raises(CommandError, match="localhost:301 for both b and c"):
        environments("x", "y", "torchrun --master-port 301 z.py", MASTER_PORT="300")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchrun --nproc-per-node 2", "a: .*the following arguments are required: training_script"),
        ("torchrun --nproc 2 x.py", "a: .*ambiguous option"),
        ("torchrun --master-port many x.py", "a: .*invalid int value"),
        ("torchrun --nnodes two x.py", "a: expected --nnodes N or MIN:MAX, got 'two'"),
    ],
)
def test_what_torchrun_would_refuse_is_refused_before_it_starts(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        meet(text)
