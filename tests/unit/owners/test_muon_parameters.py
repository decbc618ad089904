"""`muon_parameters` divides the parameters of a network."""

import pytest
from torch import nn

from crossover_ddp.muon_hooks import muon_parameters


@pytest.mark.defect("strangers-16")
def test_muon_parameters_are_hidden_matrices_only() -> None:
    net = nn.Sequential(nn.Embedding(7, 6), *(nn.Linear(6, outputs) for outputs in (6, 6, 7)))
    matrices, others = muon_parameters(net)
    assert [id(matrix) for matrix in matrices] == [id(net[1].weight), id(net[2].weight)]
    assert {id(p) for p in (*matrices, *others)} == {id(p) for p in net.parameters()}
    net[3].weight = net[0].weight
    assert len(muon_parameters(net)[0]) == 2
    assert len(muon_parameters(net, head=net[2])[0]) == 1
