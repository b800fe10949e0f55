from __future__ import annotations

import pytest

from tests.fuzz.formats import FORMATS
from tests.fuzz.judge import judge
from tests.fuzz.seeds import SEEDS


@pytest.mark.parametrize("title", SEEDS)
def test_an_input_that_ended_badly_does_so_no_more(title: str) -> None:
    name, number, edit = SEEDS[title]
    form = FORMATS[name]
    files = edit(form.honest()[number])
    for read in form.readers:
        verdict = judge(files, read)
        assert verdict.outcome != "defect", verdict.detail
