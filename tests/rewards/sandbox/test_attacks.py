"""Test that every attack is contained, in bubblewrap and in a session. ``attacks.py`` defines what
that means.
"""

import pytest
from attacks import ATTACKS
from harness import Rig, require

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["bwrap", "session"])
def rig(request):
    require(request.param)
    with Rig(request.param) as rig:
        yield rig


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_every_attack_is_contained(attack, rig):
    assert rig.run(attack) is None


def test_the_attacks_cover_every_category():
    groups = {attack.group for attack in ATTACKS}
    assert len(ATTACKS) >= 150 and len({str(attack) for attack in ATTACKS}) == len(ATTACKS)
    assert groups == {
        "other processes",
        "signals",
        "limits",
        "files",
        "clean-up",
        "network",
        "the kernel",
        "verdicts",
        "answers",
        "answers to assertions",
        "outputs",
    }
