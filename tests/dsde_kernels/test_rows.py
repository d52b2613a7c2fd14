"""Row helpers of the twins."""

import pytest
import torch

from dsde_kernels.rows import argmax


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 1000, 4096])
def test_argmax_takes_the_lowest_id_on_ties(vocabulary):
    x = torch.randint(0, 3, (50, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    assert argmax(x).tolist() == [row.index(max(row)) for row in x.tolist()]


@pytest.mark.parametrize("vocabulary", [128, 131])
def test_argmax_of_nan_infinite_and_no_rows(vocabulary):
    x = torch.zeros(3, vocabulary)
    x[0, 77] = x[0, 100] = torch.nan
    x[1] = -torch.inf
    x[2, 90] = torch.inf
    assert argmax(x).tolist() == [77, 0, 90]
    assert argmax(x[:0]).tolist() == []
