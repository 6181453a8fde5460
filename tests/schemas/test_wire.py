"""Packed number arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.schemas.wire import Logprobs, LossMask, TokenIds


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_come_back_from_their_bytes(ids: list[int]) -> None:
    packed = TokenIds.of(ids)
    assert TokenIds(packed.data).tolist() == ids
    assert len(packed) == len(ids)
    assert packed.data == np.array(ids, dtype="<u4").tobytes()


def test_ids_are_little_endian() -> None:
    assert TokenIds.of([1, 256]).data == b"\x01\x00\x00\x00\x00\x01\x00\x00"


def test_the_array_is_a_read_only_view() -> None:
    array = TokenIds.of([1, 2]).array
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5


def test_parts_and_sums_are_packed_again() -> None:
    ids = TokenIds.of([1, 2, 3, 4])
    assert ids[1:3] == TokenIds.of([2, 3])
    assert ids[:1] + ids[3:] == TokenIds.of([1, 4])
    assert list(ids) == [1, 2, 3, 4]


def test_equality_is_by_bytes_and_kind() -> None:
    assert LossMask.of([0, 1]) == LossMask.of(np.array([0, 1]))
    assert hash(LossMask.of([0, 1])) == hash(LossMask.of([0, 1]))
    assert TokenIds.of([]) != Logprobs.of([])


@pytest.mark.parametrize("values", [[-1], [2**32], [1.5], np.array([1.0])])
def test_ids_that_do_not_fit_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="TokenIds: expected integers from 0 to 4294967295"):
        TokenIds.of(values)


def test_a_broken_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="Logprobs: expected a multiple of 4 bytes, got 6"):
        Logprobs(b"\x00" * 6)


def test_logprobs_are_float32() -> None:
    assert Logprobs.of([-0.1]).tolist() == [pytest.approx(-0.1, abs=1e-8)]
    assert Logprobs.of([-0.5, 0]).tolist() == [-0.5, 0.0]


def test_a_long_array_is_shown_short() -> None:
    assert repr(TokenIds.of(range(3))) == "TokenIds(3: [0, 1, 2])"
    assert len(repr(TokenIds.of(range(100_000)))) < 100
