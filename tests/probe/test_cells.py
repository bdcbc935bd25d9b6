"""The text form of layers and heads: does it name what it says, and nothing that the model lacks?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kvlens.errors import InputError
from kvlens.probe.cells import name_cells, parse_cells


@given(arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=12)))
def test_a_name_reads_back_to_its_cells(cells: np.ndarray) -> None:
    if not cells.any():
        return
    again = parse_cells(name_cells(cells), *cells.shape)
    assert np.array_equal(np.ones_like(cells) if again is None else again, cells)


@given(arrays(bool, (3, 4)), st.randoms())
def test_order_spaces_and_repeats_do_not_change_the_name(cells: np.ndarray, random: object) -> None:
    if not cells.any() or cells.all():
        return
    groups = [f" {layer} : {head} " for layer, head in np.argwhere(cells).tolist()] * 2
    random.shuffle(groups)  # type: ignore[attr-defined]
    assert name_cells(parse_cells(";".join(groups), 3, 4)) == name_cells(cells)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", {(1, 0), (1, 1), (1, 2), (1, 3)}),
        ("0-2:3", {(0, 3), (1, 3), (2, 3)}),
        ("0,2:1-2", {(0, 1), (0, 2), (2, 1), (2, 2)}),
        ("0:0;2:3", {(0, 0), (2, 3)}),
    ],
)
def test_a_text_names_these_cells(text: str, expected: set[tuple[int, int]]) -> None:
    cells = parse_cells(text, 3, 4)
    assert cells is not None
    assert set(map(tuple, np.argwhere(cells).tolist())) == expected


@pytest.mark.parametrize("text", [None, "all", "0-2", "0-2:0-3", "0;1;2"])
def test_every_cell_is_all(text: str | None) -> None:
    assert parse_cells(text, 3, 4) is None
    assert name_cells(None) == name_cells(np.ones((3, 4), dtype=bool)) == "all"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no layer"),
        ("x", "'x' is no layer"),
        ("-1", "'-1' is no layer"),
        ("1.5", "'1.5' is no layer"),
        ("0,", "'' is no layer"),
        ("0:", "'' is no head"),
        ("0:1:2", "'1:2' is no head"),
        ("0;", "'' is no layer"),
        ("3", "layer 3 does not exist"),
        ("2-1", "layer 2-1 does not exist"),
        ("0:4", "head 4 does not exist"),
        ("0:2-9", "head 2-9 does not exist"),
    ],
)
def test_what_is_no_cell_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_cells(text, 3, 4)
    assert message in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.hint
