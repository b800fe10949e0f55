"""Cuts a program into segments that fit into memory, where the fewest bytes are live.

All batches run through one segment before the next, so that each weight is moved once regardless of the
number of batches. The values that are live at a cut, the boundary, are kept for each batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ampaudit.core.errors import UsageError
from ampaudit.core.text import format_bytes
from ampaudit.run.device import storages_of
from ampaudit.run.program import Program
from ampaudit.trace.graph import Slot

_WIDE = 4  # bytes of a float in either run: 16-bit values are emulated in float32
_COPIES = 1.5  # bytes of a weight's 16-bit copy and its float32 carrier, per byte of the master
_PER_CUT = 1 << 16  # bytes that a cut has to save


@dataclass(frozen=True, slots=True)
class Segment:
    """Groups of steps that run for every batch before the next segment begins."""

    start: int  # index of its first group
    end: int  # index after its last group
    weights: frozenset[str]  # placeholders of the weights that it reads
    weight_bytes: int  # bytes of these weights as FP32 masters
    value_bytes: int  # peak of live bytes inside, for both runs of one batch, including copies of weights
    boundary_bytes: int  # live bytes at its end, for both runs of one batch

    @property
    def bytes(self) -> int:
        """Bytes that it needs in addition to the boundaries of other batches."""
        return self.weight_bytes + self.value_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """The weights that a group of steps reads, and the live bytes of both runs in and after it."""

    weights: frozenset[str]
    peak: int
    after: int


def program_bytes(program: Program) -> int:
    """Return the bytes that a program needs in one segment."""
    return cut_program(program, None)[0].bytes


def cut_program(program: Program, limit: int | None, runs: int = 1) -> tuple[Segment, ...]:
    """Cut a program so that each segment fits the limit and the boundaries are minimal.

    Args:
        program: The program, with the shapes of its values.
        limit: Memory in bytes; ``None`` for one segment.
        runs: Number of runs side by side, each with its own values.

    Raises:
        UsageError: A single group of ops needs more.
    """
    groups, sizes = _groups(program, runs), _weight_sizes(program)
    if limit is None:
        return (_segment(groups, sizes, 0, len(groups)),)
    ends = best_ends(groups, sizes, limit)
    pairs = zip([0, *ends], ends, strict=False)
    return tuple(_segment(groups, sizes, start, end) for start, end in pairs)


def best_ends(groups: Sequence[Group], sizes: Mapping[str, tuple[int, int]], limit: int) -> list[int]:
    """Return the ends of segments within a limit with the smallest sum of boundaries.

    Uses dynamic programming over the ends. The starts that fit an end form a sliding window, and the cheapest
    of them is the head of a monotonic queue, so the time is linear in the number of groups.
    """
    least = max((_bytes_of(group.weights, sizes) + group.peak for group in groups), default=0)
    if least > limit:
        raise UsageError(
            f"--memory {format_bytes(limit)} is too little: the largest group of ops needs "
            f"{format_bytes(least)}",
            hint="give more memory, or use a smaller batch",
        )
    costs, starts = [0], [0]
    queue: deque[int] = deque()  # starts that may still be best, the cheapest first
    low, window = 0, _Window(groups, sizes)
    for end, group in enumerate(groups, 1):
        while queue and costs[queue[-1]] >= costs[end - 1]:
            queue.pop()
        queue.append(end - 1)
        window.add(end - 1)
        while window.bytes > limit:
            window.remove(low)
            low += 1
        while queue[0] < low:
            queue.popleft()
        starts.append(queue[0])
        costs.append(costs[queue[0]] + (group.after + _PER_CUT if end < len(groups) else 0))
    ends = [len(groups)]
    while starts[ends[-1]] > 0:
        ends.append(starts[ends[-1]])
    return ends[::-1]


def cut_evenly(program: Program, count: int) -> tuple[Segment, ...]:
    """Cut a program into at most ``count`` segments, minimizing the largest."""
    best = cut_program(program, None)
    whole = best[0]
    low, high = 0, whole.bytes
    while high - low > max(whole.bytes // 1000, 1):
        middle = (low + high) // 2
        try:
            segments = cut_program(program, middle)
        except UsageError:
            low = middle
            continue
        if len(segments) <= count:
            high, best = middle, segments
        else:
            low = middle
    return best


def aligned_ends(program: Program, segments: Sequence[Segment], names: Mapping[str, int]) -> list[int]:
    """Return the groups at which the segments of one program end in another, by the weights they read.

    The last segment always ends with the program.

    ``names`` holds the first segment that reads a weight, by name of the weight.
    """
    places = {place.node: place.name for place in program.traced.placeholders}
    ends, current = [0] * len(segments), 0
    for index, weights in enumerate(weights_by_group(program)):
        current = max([current, *(names[places[w]] for w in weights if places[w] in names)])
        for segment in range(current, len(segments)):
            ends[segment] = index + 1
    last = len(program.groups)
    return [*(min(end, last - 1) for end in ends[:-1]), last]


def weights_by_group(program: Program) -> list[frozenset[str]]:
    """Return the weights that each group of steps reads, by placeholder."""
    weights = _weight_sizes(program).keys()
    return [
        frozenset(n.name for step in group for n in step.node.all_input_nodes if n.name in weights)
        for group in program.groups
    ]


def _weight_sizes(program: Program) -> dict[str, tuple[int, int]]:
    """Return the identity and bytes of each weight by placeholder; written ones count as values."""
    written_names = {node.name for node in program.written}
    sizes: dict[str, tuple[int, int]] = {}
    for place in program.traced.placeholders:
        tensor = program.traced.tensors.get(place.node)
        if place.slot is not Slot.INPUT and tensor is not None and place.node not in written_names:
            sizes[place.node] = id(tensor), tensor.numel() * tensor.element_size()
    return sizes


def _groups(program: Program, runs: int) -> list[Group]:
    sizes = _weight_sizes(program)
    weights = weights_by_group(program)
    counted: Counter[int] = Counter()  # number of live nodes by storage, which views share
    memory: dict[int, int] = {}
    owned: dict[fx.Node, list[int]] = {}
    hidden = {key for node in program.inputs if node.name in sizes for key, _ in _memory_of(node)}

    def begin(node: fx.Node) -> None:
        storages = [(key, size) for key, size in _memory_of(node) if key not in hidden]
        owned[node] = [key for key, _ in storages]
        memory.update(storages)
        counted.update(owned[node])

    def live() -> int:
        return sum(memory[key] for key in counted)

    for node in program.inputs:
        if node.name not in sizes:
            begin(node)
    result: list[Group] = []
    for group, read in zip(program.groups, weights, strict=True):
        for step in group:
            begin(step.node)
        copies = max((sizes[name][1] for name in read), default=0)
        peak = live() + int(_COPIES * copies)
        for step in group:
            for node in step.frees:
                counted.subtract(owned.pop(node, ()))
        counted = +counted  # drop storages without live nodes
        result.append(Group(read, peak * runs, live() * runs))
    return result


def _memory_of(node: fx.Node) -> Iterator[tuple[int, int]]:
    """Yield the storages of a node's values and their bytes in both runs, as far as they are known."""
    for value, key, size in storages_of(node):
        floats = value.is_floating_point() or value.is_complex()
        wide = max(_WIDE, value.element_size()) / value.element_size()
        yield key, int(2 * wide * size) if floats else size


class _Window:
    """The groups of a segment that grows at its end and shrinks at its start."""

    def __init__(self, groups: Sequence[Group], sizes: Mapping[str, tuple[int, int]]) -> None:
        self._groups, self._sizes = groups, sizes
        self._uses: Counter[int] = Counter()
        self._weights = 0
        self._peaks: deque[int] = deque()  # groups whose peak no later one exceeds

    @property
    def bytes(self) -> int:
        return self._weights + self._groups[self._peaks[0]].peak

    def add(self, index: int) -> None:
        for key, size in {self._sizes[name] for name in self._groups[index].weights}:
            self._weights += 0 if self._uses[key] else size
            self._uses[key] += 1
        while self._peaks and self._groups[self._peaks[-1]].peak <= self._groups[index].peak:
            self._peaks.pop()
        self._peaks.append(index)

    def remove(self, index: int) -> None:
        for key, size in {self._sizes[name] for name in self._groups[index].weights}:
            self._uses[key] -= 1
            self._weights -= 0 if self._uses[key] else size
        if self._peaks[0] == index:
            self._peaks.popleft()


def _segment(groups: Sequence[Group], sizes: Mapping[str, tuple[int, int]], start: int, end: int) -> Segment:
    inside = groups[start:end]
    weights = frozenset().union(*(group.weights for group in inside))
    weight_bytes = _bytes_of(weights, sizes)
    values = max((group.peak for group in inside), default=0)
    boundary = inside[-1].after if inside and end < len(groups) else 0
    return Segment(start, end, weights, weight_bytes, values, boundary)


def _bytes_of(weights: frozenset[str], sizes: Mapping[str, tuple[int, int]]) -> int:
    return sum(dict(sizes[name] for name in weights).values())
