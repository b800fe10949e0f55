from __future__ import annotations

from pathlib import Path
from random import Random

from ampaudit.core.errors import WeightsError
from ampaudit.export.verify import verify
from tests.fuzz import honest
from tests.fuzz.judge import write_files

FLIPS = 2000


def test_every_flipped_bit_of_a_converted_directory_is_named(tmp_path: Path) -> None:
    files = honest.converted()[0]
    write_files(tmp_path, files)
    assert verify(tmp_path / "d", run=False).problems == ()
    random, names = Random(0), sorted(files)
    sizes = [(tmp_path / name).stat().st_size for name in names]
    missed = []
    for _ in range(FLIPS):
        name = random.choices(names, sizes)[0]  # anywhere: a larger file is hit more often
        path = tmp_path / name
        before = path.read_bytes()
        place = random.randrange(len(before))
        path.write_bytes(
            before[:place] + bytes([before[place] ^ 1 << random.randrange(8)]) + before[place + 1 :]
        )
        if path.name not in _named(tmp_path / "d"):
            missed.append((name, place))
        path.write_bytes(before)
    assert missed == []


def _named(directory: Path) -> str:
    """Return the text of what verify finds."""
    try:
        return "\n".join(problem.where for problem in verify(directory, run=False).problems)
    except WeightsError as error:  # of the manifest itself
        return str(error.args[0])
