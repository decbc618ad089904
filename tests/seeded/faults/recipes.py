"""Faults of recipes, and of what their tests alone would see."""

from typing import Final

from tests.seeded.fault import Fault

_MINIMAL, _LAB, _TRAIN = (
    "tests/recipes/test_minimal.py",
    "tests/recipes/test_lab.py",
    "tests/recipes/test_train.py",
)

RECIPES: Final[tuple[Fault, ...]] = (
    Fault(
        why="a second list of modules takes the place of the server's, and each rank imports all of them itself",
        path="tests/unit/turns/joined_segments.py",
        old='DEVICE = "dev0"\n',
        new='DEVICE = "dev0"\ncontext.set_forkserver_preload(["torch", "tests.harness._worker"])\n',
        tests=("tests/harness/test_preloaded.py", "tests/unit/turns/test_turn_segment.py"),
    ),
    Fault(
        why="a forked rank's loader starts its workers by a server of its own",
        path="tests/harness/_worker.py",
        old="    start_like_anybody()\n",
        new="",
        tests=("tests/harness/test_preloaded.py",),
    ),
    Fault(
        why="two programs that name one device compute at the same time, each on a device of its own",
        path="recipes/minimal_mutex.py",
        old='else "core0")',
        new='else f"core-{args.name}")',
        tests=(f"{_MINIMAL}::test_two_programs_take_turns",),
    ),
    Fault(
        why="turns that a sibling gave back are not counted as handed over",
        path="crossover_ddp/_turns/turns.py",
        old="if since_s * 1e9 < given_back_ns <= now_ns:",
        new="if since_s * 1e9 > given_back_ns > now_ns:",
        tests=(f"{_MINIMAL}::test_two_programs_take_turns",),
    ),
    Fault(
        why="a run resumed in its second epoch begins that epoch again",
        path="recipes/train.py",
        old="skip=done * args.accumulate,",
        new="skip=0 if epoch else done * args.accumulate,",
        tests=(f"{_TRAIN}::test_resume_across_epochs_with_adamw",),
    ),
    Fault(
        why="a resumed run has the order of the first epoch's samples",
        path="recipes/_data.py",
        old="    sampler.set_epoch(epoch)\n    order",
        new="    sampler.set_epoch(epoch if not skip else 0)\n    order",
        tests=(f"{_TRAIN}::test_resume_across_epochs_with_adamw",),
    ),
    Fault(
        why="AdamW's moments are not restored",
        path="recipes/train.py",
        old="            optimizer.load_state_dict(saved)\n",
        new="            pass\n",
        tests=(f"{_TRAIN}::test_resume_across_epochs_with_adamw",),
    ),
    Fault(
        why="random crops follow the process that loads, not the image",
        path="recipes/_data.py",
        old="            torch.manual_seed((self.seed * 10_007 + self.epoch) * len(self) + index)\n",
        new="",
        tests=(f"{_TRAIN}::test_image_folder_trains_and_does_not_depend_on_workers",),
    ),
    Fault(
        why="copies in their warm-up exchange nothing",
        path="tests/multiprocess/replicas.py",
        old="self.copies.step(together=local < 0 or self._every == 1)",
        new="self.copies.step(together=self._every == 1)",
        tests=("tests/multiprocess/test_averaging.py", "-k", "4-post_local"),
    ),
    Fault(
        why="what killed labs leave is found by namespace only, their processes live on",
        path="recipes/lab/nodes.py",
        old="{lab for lab, _ in marked_labs() if not lab.alive()}",
        new="{lab for lab, _ in lab_namespaces() if not lab.alive()}",
        tests=(f"{_LAB}::test_what_a_killed_lab_leaves_is_cleaned",),
    ),
    Fault(
        why="an interrupted lab ends its ranks' sessions but not what has left them",
        path="recipes/lab/nodes.py",
        old="            end_marked(LAB_VARIABLE, str(self.lab))\n",
        new="",
        tests=(f"{_LAB}::test_interrupted_labs_clean_up",),
    ),
    Fault(
        why="SIGTERM ends a lab at once, and nothing is cleaned",
        path="recipes/lab/signals.py",
        old="(signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n)",
        new="(signal.SIGHUP,) if signal.getsignal(n)",
        tests=(f"{_LAB}::test_interrupted_labs_clean_up",),
    ),
    Fault(
        why="the command line of the lab starts one rank on each node, whatever it is told",
        path="recipes/lab/command.py",
        old='getattr(args, "ranks_per_node", 1)',
        new='getattr(args, "ranks_of_node", 1)',
        tests=("tests/recipes/test_lab_ranks.py::test_the_command_takes_ranks_per_node",),
    ),
)
