"""Faults of owners, also those of Muon."""

from typing import Final

from tests.seeded.fault import Fault

_DEFECTS = "tests/defects/test_owners.py"
_OWNERS = "tests/multiprocess/test_owners.py"
_STATES = "tests/unit/owners/test_states.py"

OWNERS: Final[tuple[Fault, ...]] = (
    Fault(
        "a direction is applied with the learning rate of the moment at which it arrives",
        "crossover_ddp/_decoupled/owned.py",
        "take_step(update.parameter, direction, _group(plan, update.parameter))",
        "number = plan.group_of[id(update.parameter)]\n"
        "            take_step(update.parameter, direction, self.optimizer.param_groups[number])",
        (_OWNERS, "-k", "2-owned-muon"),
    ),
    Fault(
        "an owner does not apply the directions that it has computed",
        "crossover_ddp/_decoupled/owned.py",
        "for update, direction, _ in arrived:",
        "for update, direction, _ in [each for each in arrived if not each.is_own]:",
        (_OWNERS, "-k", "2-owned-muon"),
    ),
    Fault(
        "a direction takes the place of a matrix in float32",
        "crossover_ddp/_owners/muon.py",
        "return -(-numel * torch.bfloat16.itemsize // itemsize)",
        "return numel",
        ("tests/journeys/test_bits_and_buffers.py", "-k", "bytes_on and muon"),
    ),
    Fault(
        "a rank that owns nothing of a group does not count its steps",
        "crossover_ddp/_owners/optimizer.py",
        "        self._count(groups, plan.attributes)\n",
        "",
        (_OWNERS, "-k", "unused-soap"),
    ),
    Fault(
        "gradients that only owners have look like gradients of zero",
        "crossover_ddp/_decoupled/owned.py",
        "    withhold(buffer)\n",
        "    buffer.data.zero_()\n",
        (_DEFECTS, "-k", "scaler or through_data or no_number"),
    ),
    Fault(
        "a step that a scaler skips is dropped without a word",
        "crossover_ddp/_decoupled/owned.py",
        "                share.check_dropped()\n",
        "                pass\n",
        (_DEFECTS, "-k", "scaler"),
    ),
    Fault(
        "a second step of one optimizer takes the place of the first",
        "crossover_ddp/_decoupled/owned.py",
        "        if number in plans:\n",
        "        if False:\n",
        (_DEFECTS, "-k", "two_steps_of_one"),
    ),
    Fault(
        "a codec is planned for owners, which take none",
        "crossover_ddp/_decoupled/state.py",
        "        if self._owners is not None or self._kfac is not None:\n",
        "        if self._kfac is not None:\n",
        (_DEFECTS, "-k", "no_codec"),
    ),
    Fault(
        "groups that came after the state have no owner, and nobody says so",
        "crossover_ddp/_decoupled/owned.py",
        "        new = [p for p in parameters if id(p) not in self.owner_of]\n",
        "        new: list[torch.Tensor] = []\n",
        ("tests/defects/test_decoupled.py", "-k", "groups_added"),
    ),
    Fault(
        "a frozen parameter costs its owner as much as one that is trained",
        "crossover_ddp/_decoupled/owned.py",
        "            if not parameter.requires_grad:\n",
        "            if False:\n",
        (_DEFECTS, "-k", "frozen_parameters"),
    ),
    Fault(
        "what a Lookahead keeps for other ranks' parameters is dropped",
        "crossover_ddp/_decoupled/owned.py",
        "            self.kept.check_foreign()\n",
        "",
        (_DEFECTS, "-k", "lookahead"),
    ),
    Fault(
        "an optimizer with modes of its own runs on owners",
        "crossover_ddp/_decoupled/owned.py",
        "        if modes:\n",
        "        if False:\n",
        (_DEFECTS, "-k", "modes_of_its_own"),
    ),
    Fault(
        "a failed step of owners is taken for a forgotten one",
        "crossover_ddp/_decoupled/owned.py",
        "            self._failure = error\n",
        "",
        (_DEFECTS, "-k", "names_the_cause"),
    ),
    Fault(
        "Muon gets embeddings",
        "crossover_ddp/muon_hooks.py",
        "if isinstance(module, (nn.Embedding, nn.EmbeddingBag))\n",
        "if False\n",
        (_DEFECTS, "-k", "hidden_matrices_only"),
    ),
    Fault(
        "a frozen matrix costs its owner a Newton-Schulz",
        "crossover_ddp/muon_hooks.py",
        " if matrix.requires_grad else 0\n",
        "\n",
        (_DEFECTS, "-k", "frozen_parameters"),
    ),
    Fault(
        "what an optimizer does to gradients is laid to the user's charge",
        "crossover_ddp/_decoupled/owned.py",
        "Update(each.update.parameter, each.update.gradient.data)",
        "each.update",
        (_DEFECTS, "-k", "reuse_the_memory"),
    ),
    Fault(
        "rank 0 sends what it has as the state of all owners",
        "crossover_ddp/_owners/kept.py",
        "group=group, group_src=owner)",
        "group=group, group_src=0)",
        (_OWNERS, "-k", "lists_and_tuples"),
    ),
    Fault(
        "an owner's state comes to the device of the rank that has sent it",
        "crossover_ddp/_owners/kept.py",
        'place if place == "cpu" else str(device)',
        "place",
        ("tests/journeys/test_devices.py", "-k", "own_device"),
    ),
    Fault(
        "owners send what their parameters were before the step",
        "crossover_ddp/_decoupled/owned.py",
        "        self.partial.apply(plan, [each.update for each in own])\n"
        "        for update, piece, _ in own:\n"
        "            piece.copy_(update.parameter)\n",
        "        for update, piece, _ in own:\n"
        "            piece.copy_(update.parameter)\n"
        "        self.partial.apply(plan, [each.update for each in own])\n",
        (_OWNERS, "-k", "2-owned-adamw"),
    ),
    Fault(
        "Muon's momentum is that of gradients as large as the loss's scale",
        "crossover_ddp/muon_hooks.py",
        "gradient.mul_(1.0 / round_.scale)",
        "pass",
        (_OWNERS, "-k", "overflow"),
    ),
    Fault(
        "the turn is given away before owners compute",
        "crossover_ddp/muon_hooks.py",
        "        bucket.keeps_turn = True\n",
        "",
        ("tests/journeys/test_turn_and_futures.py", "-k", "owners_work"),
    ),
    Fault(
        "what came of a bucket is gone before its device is through",
        "crossover_ddp/muon_hooks.py",
        "        round_.travelled.append(back)\n",
        "",
        ("tests/conformance/test_conformance.py", "-k", "cuda_nccl-muon_of_nothing"),
    ),
    Fault(
        "all matrices have the first group's momentum",
        "crossover_ddp/muon_hooks.py",
        "DirectionSettings.of(group), group",
        "DirectionSettings.of(self.muon.param_groups[0]), group",
        (_OWNERS, "-k", "2-muon_hook"),
    ),
    Fault(
        "a step that is skipped has changed the momentum",
        "crossover_ddp/muon_hooks.py",
        "                put_momentum(state, self._next.pop(number))\n"
        "                if old is not None:\n"
        "                    self._next[number] = old\n",
        "                put_momentum(state, self._next[number])\n",
        (_STATES, "-k", "skipped"),
    ),
)
