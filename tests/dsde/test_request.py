"""What a request may ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsde import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e39),
        ("temperature", 1e-46),
        ("top_k", 2.5),
        ("top_k", 2**70),
        ("top_p", 1e-50),
        ("seed", 1.5),
        ("eos", 5),
        ("eos", [-1]),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -1.0),
        ("seed", 2**63),
        ("stop", "END"),
        ("stop", [""]),
        ("stop", None),
        ("stop", iter(["a"])),
        ("temperature", "0.5"),
        ("temperature", None),
        ("top_p", "0.5"),
        ("min_p", [0.5]),
        ("eos", "12"),
        ("eos", iter([3])),
        ("logits_processors", None),
        ("logits_processors", min),
        ("logits_processors", iter([min])),
        ("logits_processors", [3]),
        ("stopping_criteria", None),
        ("stopping_criteria", bool),
        ("stopping_criteria", iter([bool])),
        ("stopping_criteria", ["end"]),
    ],
)
def test_bad_sampling_params(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_sampling_params_take_ints_of_numpy_and_torch():
    params = SamplingParams(np.int64(5), top_k=torch.tensor(3), seed=np.int32(7), eos=torch.tensor([2, 3]).unbind())
    assert (params.max_new_tokens, params.top_k, params.seed, params.eos) == (5, 3, 7, (2, 3))
    assert all(type(n) is int for n in (params.max_new_tokens, params.top_k, params.seed, *params.eos))


def test_sampling_params_take_numbers_of_numpy():
    assert SamplingParams(temperature=np.float32(0.5), top_p=np.float64(0.5), min_p=1).truncates


def test_sampling_params_keep_what_they_were_given():
    """A list that grows later would change a request in flight."""
    given = {"stop": ["a"], "logits_processors": [min], "stopping_criteria": [bool]}
    params = SamplingParams(**given)
    for name, values in given.items():
        values.append(None)
        assert getattr(params, name) == (values[0],)
