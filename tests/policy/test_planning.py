"""Painting against its definition, depth against what adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampaudit.policy.decide import color
from ampaudit.policy.schema import Cast
from ampaudit.trace.caster import reduction_depth
from ampaudit.trace.opnames import named_arguments

# -- coloring ------------------------------------------------------------------------------------------

COLORS = (Cast.ALLOW, Cast.DENY, Cast.INFER, Cast.CLEAR, Cast.FLOAT32)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Cast], list[list[int]]]:
    size = draw(st.integers(1, 9))
    colors = draw(st.lists(st.sampled_from(COLORS), min_size=size, max_size=size))
    inputs = [
        draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3)) if n else [] for n in range(size)
    ]
    return colors, inputs


def colored_by_definition(colors: list[Cast], inputs: list[list[int]]) -> list[bool]:
    """The four steps, by enumerating every directed path of the graph (exponential, and obvious)."""
    size = len(colors)
    free = {n for n in range(size) if colors[n] in (Cast.INFER, Cast.CLEAR)}
    paths: list[list[int]] = [[n] for n in range(size)]
    for path in paths:
        paths.extend([*path, user] for user in range(size) if path[-1] in inputs[user])
    denied = {n for n in range(size) if colors[n] is Cast.DENY}
    ends = (Cast.DENY, Cast.INFER)
    for path in paths:
        inside = path[1:-1]
        if colors[path[0]] is Cast.DENY and colors[path[-1]] in ends and set(inside) <= free:
            denied |= {n for n in path[1:] if n in free}
    low = {n for n in range(size) if colors[n] is Cast.ALLOW}
    open_way = free - denied
    between = {
        n
        for path in paths
        if len(path) > 2 and path[0] in low and path[-1] in low and set(path[1:-1]) <= open_way
        for n in path[1:-1]
    }
    low |= between
    clear = {n for n in range(size) if colors[n] is Cast.CLEAR} - denied
    while True:
        more = {
            n
            for n in clear - low
            if any(m in low for m in [*inputs[n], *(u for u in range(size) if n in inputs[u])])
        }
        if not more:
            return [n in low for n in range(size)]
        low |= more


@settings(max_examples=400, deadline=None)
@given(graphs())
def test_coloring_equals_its_definition(graph: tuple[list[Cast], list[list[int]]]) -> None:
    colors, inputs = graph
    assert color(colors, inputs) == colored_by_definition(colors, inputs)


# -- depth ------------------------------------------------------------------------------------------

ONES = torch.ones
DEPTHS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.ops.aten.linear.default, (ONES(2, 7), ONES(3, 7)), {}),
    (torch.ops.aten.mm.default, (ONES(2, 7), ONES(7, 3)), {}),
    (torch.ops.aten.bmm.default, (ONES(4, 2, 7), ONES(4, 7, 3)), {}),
    (torch.ops.aten.addbmm.default, (torch.zeros(2, 3), ONES(4, 2, 7), ONES(4, 7, 3)), {}),
    (torch.ops.aten.baddbmm.default, (torch.zeros(4, 2, 3), ONES(4, 2, 7), ONES(4, 7, 3)), {}),
    (torch.ops.aten.addmm.default, (torch.zeros(2, 3), ONES(2, 7), ONES(7, 3)), {}),
    (torch.ops.aten.matmul.default, (ONES(5, 2, 7), ONES(7, 3)), {}),
    (torch.ops.aten.mv.default, (ONES(2, 7), ONES(7)), {}),
    (torch.ops.aten.dot.default, (ONES(7), ONES(7)), {}),
    (torch.ops.aten.einsum.default, ("bij,bjk->ik", [ONES(4, 2, 7), ONES(4, 7, 3)]), {}),
    (torch.ops.aten.conv1d.default, (ONES(1, 6, 9), ONES(4, 3, 5), None, [1], [0], [1], 2), {}),
    (
        torch.ops.aten.conv2d.default,
        (ONES(1, 6, 9, 9), ONES(4, 3, 5, 2), None, [1, 1], [0, 0], [1, 1], 2),
        {},
    ),
    (torch.ops.aten.conv3d.default, (ONES(1, 2, 5, 5, 5), ONES(4, 2, 3, 2, 2)), {}),
    (torch.ops.aten.sum.default, (ONES(3, 4, 5),), {}),
    (torch.ops.aten.sum.dim_IntList, (ONES(3, 4, 5), [0, 2]), {}),
    (torch.ops.aten.sum.dim_IntList, (ONES(3, 4, 5), [-1], True), {}),
    (torch.ops.aten.nansum.default, (ONES(3, 4),), {}),
]


@pytest.mark.parametrize("case", DEPTHS, ids=lambda case: str(case[0]))
def test_depth_is_what_adds_up_in_an_op_on_ones(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    op, args, kwargs = case
    assert reduction_depth(op, named_arguments(op, args, kwargs)) == op(*args, **kwargs).max().item()


def test_depth_of_means_is_the_product_of_the_axes() -> None:
    aten = torch.ops.aten
    image = ONES(2, 3, 512, 512)
    for op, args, expected in (
        (aten.mean.dim, (image, [2, 3]), 512 * 512),
        (aten.var.correction, (image, [0, 2]), 1024),
        (aten.softmax.int, (image, 1), 3),
        (aten.avg_pool2d.default, (image, [4]), 16),
        (aten.adaptive_avg_pool2d.default, (image, [1, 1]), 512 * 512),
        (aten.layer_norm.default, (image, [512, 512]), 512 * 512),
        (aten.group_norm.default, (image, 3), 512 * 512),
        (aten.relu.default, (image,), None),
    ):
        assert reduction_depth(op, named_arguments(op, args, {})) == expected
