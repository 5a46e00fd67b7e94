"""Cutting a model: grains tile tensors and flat vectors, and depend on the model alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from elastic_train.errors import ConfigError
from elastic_train.placement.grains import GRAIN, Listed, cut_along, edges_of, lay_out
from tests.elastic_train.placement.laws import check_cut, models

F32 = "torch.float32"


@given(models())
def test_grains_tile_every_tensor_and_every_flat_vector(listed: list[Listed]) -> None:
    """Every element is in exactly one grain; every tensor begins at a multiple of 64 elements."""
    check_cut(lay_out(listed))


@given(models())
def test_every_name_stands_for_one_tensor_and_ties_count_once(listed: list[Listed]) -> None:
    """All names exist, and there are as many tensors as separate pieces of memory."""
    layout = lay_out(listed)
    assert sorted(name for tensor in layout.tensors for name in tensor.names) == sorted(one.name for one in listed)
    assert len(layout.tensors) == len({one.memory for one in listed})


@given(models())
def test_a_flat_vector_has_one_unit_dtype_and_parameter_group(listed: list[Listed]) -> None:
    """One gather, one kernel and one rate then serve all of it; frozen tensors are separate."""
    layout = lay_out(listed)
    first = {one.name: one for one in reversed(listed)}
    for tensor in layout.tensors:
        one, flat = first[tensor.names[0]], layout.flats[tensor.flat]
        unit = "" if len({first[name].unit for name in tensor.names}) > 1 else one.unit
        assert (flat.unit, flat.dtype, flat.group) == (unit, one.dtype, one.group)
    trained = {grain for t in layout.tensors if layout.flats[t.flat].group is not None for grain in t.grains}
    assert layout.trained.tolist() == sorted(trained)


@given(models())
def test_grains_are_numbered_in_the_models_order_whatever_the_units_and_groups(listed: list[Listed]) -> None:
    """Sums in the grains' order do not change with the units, the groups, or what is frozen."""
    plain = lay_out([Listed(one.name, one.shape, one.dtype, "", 0, one.memory, one.cut) for one in listed])
    layout = lay_out(listed)
    for name in ("tensor_of", "lo", "hi"):
        assert np.array_equal(getattr(layout, name), getattr(plain, name))


def test_a_small_layout_by_hand() -> None:
    layout = lay_out(
        [
            Listed("embed", (2, GRAIN), F32, memory=1),
            Listed("bias", (70,), F32),
            Listed("scalar", (), F32),
            Listed("none", (0, 3), F32),
            Listed("head", (2, GRAIN), F32, "root", memory=1),
        ]
    )
    assert [tensor.names for tensor in layout.tensors] == [("embed", "head"), ("bias",), ("scalar",), ("none",)]
    assert [tensor.grains for tensor in layout.tensors] == [range(2), range(2, 3), range(3, 4), range(4, 4)]
    assert [tensor.bounds for tensor in layout.tensors[1:]] == [(0, 70), (0, 1), (0,)]
    assert [tensor.start for tensor in layout.tensors] == [0, 2 * GRAIN, 2 * GRAIN + 128, 2 * GRAIN + 192]
    assert layout.span.tolist() == [GRAIN, GRAIN, 128, 64]
    assert layout.tensors[0].units == ("", "root")
    assert [flat.numel for flat in layout.flats] == [2 * GRAIN + 192]


def test_no_grain_crosses_the_edge_of_a_part() -> None:
    """A dimension of 12 is cut at halves, thirds, quarters, sixths and twelfths; long parts are cut again."""
    assert edges_of(12) == tuple(range(13)) and edges_of(127) == (0, 127)
    assert edges_of(128) == tuple(range(0, 129, 2)), "64 parts at most"
    rows = Listed("rows", (12, GRAIN // 2), F32, cut=cut_along((12, GRAIN // 2), 0))
    columns = Listed("columns", (GRAIN + 5, 3), F32, cut=cut_along((GRAIN + 5, 3), 1))
    layout = lay_out([rows, columns])
    assert [len(tensor.grains) for tensor in layout.tensors] == [12, 6]
    assert layout.span.tolist() == [GRAIN // 2] * 12 + [GRAIN, 5, GRAIN, 5, GRAIN, 5 + 49]
    part = lay_out([Listed("rows", (4, GRAIN // 2), F32, cut=rows.cut and rows.cut.part(4, 8))])
    assert part.span.tolist() == [GRAIN // 2] * 4


def test_the_digest_tells_layouts_apart() -> None:
    """It changes with a shape, a name, a group or the order, but not if the layout is rebuilt."""
    a, b = Listed("a", (3, 4), F32), Listed("b", (4,), F32)
    layouts = [[a, b], [b, a], [a], [Listed("a", (4, 3), F32), b], [a, Listed("b", (4,), F32, group=1)]]
    assert len({lay_out(listed).digest for listed in layouts}) == len(layouts)
    assert lay_out([a, b]).digest == lay_out([a, b]).digest
    assert lay_out([a, b]).digest == "4b364db768bf3d36ce24b4e813efffc29878e3fa1552da16183832e44cfde809"


def test_a_model_without_tensors_has_no_grains() -> None:
    assert lay_out([]).num_grains == 0


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([Listed("a", (1,), F32), Listed("a", (2,), F32)], "lists two tensors as 'a'"),
        ([Listed("a", (1, 2), F32, memory=7), Listed("b", (2, 1), F32, memory=7)], "'a' .* and 'b' .* share memory"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(listed: list[Listed], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(listed)
