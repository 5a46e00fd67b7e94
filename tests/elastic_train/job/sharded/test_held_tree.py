"""Spans of a commit: each writer's are its grains, joined where they are contiguous in memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.core.arrays import Int64s
from elastic_train.job.sharded.held_tree import Held, cuts_of, spans_of
from elastic_train.placement.grains import Layout, Listed, lay_out
from elastic_train.placement.holdings import all_held, circle_of, sections_of
from elastic_train.placement.seats import seats_of
from tests.elastic_train.placement.laws import models

worlds = st.tuples(st.integers(1, 20), st.integers(1, 30))


@given(models(), worlds)
def test_writers_cut_every_tensor_into_its_elements_once(listed: list[Listed], world: tuple[int, int]) -> None:
    """This holds for any number of writers and of sections at whose ends memory is cut."""
    layout, written = _written(listed, world)
    for tensor, by_writer in zip(layout.tensors, cuts_of(layout, written), strict=True):
        assert len(by_writer) == len(written)
        spans = sorted(span for spans in by_writer for span in spans)
        ends = [0, *(hi for _, hi in spans)]
        assert [lo for lo, _ in spans] == ends[:-1] and ends[-1] == tensor.numel


@given(models(), worlds)
def test_a_span_joins_grains_of_one_section_and_no_others(listed: list[Listed], world: tuple[int, int]) -> None:
    """A writer thus has as few spans as contiguous pieces of memory."""
    layout, written = _written(listed, world)
    for held in written:
        for tensor, spans in spans_of(layout, held).items():
            expected = list[tuple[int, int]]()
            for grain in _grains_of(layout, tensor, held.grains):
                lo, hi = int(layout.lo[grain]), int(layout.hi[grain])
                is_next = bool(expected) and expected[-1][1] == lo
                if is_next and held.sections[grain] == held.sections[grain - 1]:
                    lo = expected.pop()[0]
                expected.append((lo, hi))
            assert spans == expected


def _written(listed: list[Listed], world: tuple[int, int]) -> tuple[Layout, list[Held]]:
    """Return a layout, and the elements that each rank of a world holds if all are held once."""
    layout, (num_ranks, num_sections) = lay_out(listed), world
    circle = circle_of(layout)
    sections = sections_of(circle, num_sections)
    return layout, [Held(grains, sections) for grains in all_held(circle, seats_of([()] * num_ranks, 1))]


def _grains_of(layout: Layout, tensor: int, held: Int64s) -> list[int]:
    return np.intersect1d(held, np.array(layout.tensors[tensor].grains, dtype=np.int64)).tolist()
