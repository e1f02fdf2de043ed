"""The golden files against transformers as it is installed here; run by `make reference`."""

import pytest

from tests.reference import make_goldens, reference
from tests.reference.configs import CASES
from tests.reference.distance import distance, faults

LENGTHS = [pytest.param(case, length, id=f"{case.name}-{length}") for case in CASES for length in case.lengths]


@pytest.mark.parametrize(("case", "length"), LENGTHS)
def test_goldens_close_to_transformers(case, length):
    whole, cuts = make_goldens.measure(reference.build(case.config, case.tensors()), case, length)
    assert faults(distance(whole, make_goldens.stored(case, length))) == []
    for name, distances in cuts.items():
        assert faults(distances) == [], f"transformers {name} against itself"


def test_a_missing_tensor_is_an_error():
    case = CASES[0]
    tensors = case.tensors()
    del tensors["model.layers.0.linear_attn.A_log"]
    with pytest.raises(RuntimeError, match=r"layers\.0\.linear_attn\.A_log"):
        reference.build(case.config, tensors)


def test_another_model_is_not_close_to_the_goldens():
    case = CASES[0]
    tensors = case.tensors()
    tensors["model.layers.0.linear_attn.dt_bias"] = tensors["model.layers.0.linear_attn.dt_bias"] + 0.01
    whole = make_goldens.run(reference.build(case.config, tensors), case, 7, [(0, 7)])
    assert len(faults(distance(whole, make_goldens.stored(case, 7)))) == 5
