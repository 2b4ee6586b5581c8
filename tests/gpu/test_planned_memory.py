"""What a training takes on this GPU is what its plan says, within a tenth."""

import pytest
from measure_plan import CASES, TOLERANCE, make_base, measured, planned, settings_of


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, make_base(folder, "llama3.2-1b")


@pytest.mark.parametrize("case", list(CASES))
def test_a_training_takes_what_is_planned(base, tmp_path, case):
    mapping = settings_of(case, *base, tmp_path)
    expected = planned(mapping)
    assert measured(mapping, tmp_path) == pytest.approx(expected, rel=TOLERANCE)
