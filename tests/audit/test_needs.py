"""Options of scan exclude each other exactly where one takes away what the other needs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from ampaudit.audit.config import ScanConfig
from ampaudit.core.errors import UsageError

VALUES: dict[str, Any] = {
    "ranges": True, "static": True, "prove": True, "stress": 1, "advise": True, "diff": True,
    "backward": True, "sensitivity": True, "steps": 2, "assume": ("input=0:1",), "contract": "flush-to-zero",
    "against": "x.py", "sweep": "length=8,16", "memory": "1GB",
}  # fmt: skip
# written down by hand: nothing of it is computed from needs
EXCLUDED = {
    "ranges": "static prove contract stress advise diff",
    "static": "stress advise diff",
    "backward": "ranges static contract stress advise diff",
    "steps": "ranges static assume prove stress backward",
    "sweep": "ranges static stress",
    "memory": "static backward steps sensitivity against",
    "sensitivity": "ranges static steps against",
    "against": "ranges static stress backward steps sweep",
    "contract": "static assume prove stress",  # a proof assumes what a contract changes
}
PAIRS = {frozenset((option, other)) for option, others in EXCLUDED.items() for other in others.split()}


@pytest.mark.parametrize(("first", "second"), list(combinations(VALUES, 2)))
def test_two_options_are_refused_exactly_if_listed(first: str, second: str) -> None:
    config = ScanConfig(device="cpu", **{name: VALUES[name] for name in (first, second)})
    if frozenset((first, second)) not in PAIRS:
        config.check()
        return
    with pytest.raises(UsageError, match=r"cannot be combined with .*, which needs ") as caught:
        config.check()
    assert f"--{first} " in f"{caught.value.hint} "
    assert f"--{second} " in f"{caught.value.hint} "


def test_the_message_gives_the_reason() -> None:
    with pytest.raises(UsageError) as caught:
        ScanConfig(device="cpu", sweep="length=8,16", stress=1).check()
    assert str(caught.value) == (
        "--sweep cannot be combined with --stress, which needs one size of the inputs\n"
        "  next: leave out --sweep or --stress"
    )
