"""The deliberate faults of `make rewriting-faults` fit the source."""

import pytest

from tests.rewriting_faults.faults import FAULTS
from tests.support.faults import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=[each.what.replace(" ", "-") for each in FAULTS])
def test_the_source_has_the_text_of_a_fault_once(fault):
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.old != fault.new
    assert (ROOT / "tests" / "compress" / fault.test).exists()


def test_faults_are_different():
    assert len({fault.what for fault in FAULTS}) == len(FAULTS) >= 40
