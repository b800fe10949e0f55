from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.formats import FORMATS, judged
from tests.fuzz.judge import judge

INPUTS = 2000


def test_the_shares_are_two_thousand_inputs() -> None:
    assert sum(form.share for form in FORMATS.values()) == INPUTS


@pytest.mark.parametrize("name", FORMATS)
def test_an_honest_input_is_accepted(name: str) -> None:
    form = FORMATS[name]
    accepted = [judge(files, form.readers[0]).outcome for files in form.honest()]
    assert accepted == ["accepted"] * len(accepted)


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_input_is_accepted_or_refused(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    outcomes: set[str] = set()

    @settings(
        derandomize=True,
        database=None,
        max_examples=form.share,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def check(random: Random) -> None:
        verdict = judged(form, random, keep=tmp_path / "defect")
        outcomes.add(verdict.outcome)
        assert verdict.outcome != "defect", f"{verdict.detail}\nthe input: {tmp_path / 'defect'}"

    check()
    assert outcomes == {"accepted", "refused"}, "the mutators are too tame or too wild"
