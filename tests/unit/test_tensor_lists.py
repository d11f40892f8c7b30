"""Operations on lists of tensors: each tensor gets the result that it would get alone, to the last digit."""

import math

import pytest
import torch

from fsdp_cp.reduce import lerp_, squared_norms

SHAPES = [(7, 5), (0, 5), (1,), (), (3, 2, 4), (0,), (1000,)]


def tensors(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(100 * torch.randn(shape, generator=generator)).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norms_are_those_of_each_alone(dtype):
    given = tensors(dtype)
    alone = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in given])
    found = squared_norms(given)
    assert found.dtype == torch.float64 and torch.equal(found, alone)
    truth = torch.stack([x.double().square().sum() for x in given])
    torch.testing.assert_close(found, truth, rtol=1e-13, atol=0)


def test_squared_norms_of_mixed_dtypes_and_of_slices():
    matrix = torch.randn(6, 8)
    given = [matrix[:, 1:4], matrix.T, matrix.double(), matrix.bfloat16()[2:]]
    alone = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in given])
    assert torch.equal(squared_norms(given), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norms_of_large_tensors(dtype):
    """The CPU casts large tensors in pieces: whole pieces, and a rest."""
    given = [torch.randn(256, 256).to(dtype), torch.randn(3, 7), torch.randn(32769).to(dtype)[1:], torch.randn(100_003)]
    alone = torch.stack([x.double().square().sum() for x in given])
    torch.testing.assert_close(squared_norms(given), alone, rtol=1e-13, atol=0)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_shows_in_its_own_norm_alone(bad):
    given = tensors(torch.float32)
    given[4][1, 1, 2] = bad
    finite = squared_norms(given).isfinite().tolist()
    assert finite == [i != 4 for i in range(len(given))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changes_in_place_are_those_of_each_alone(dtype):
    given, towards = tensors(dtype), tensors(dtype, seed=1)
    expected = [x.lerp(y, 0.125) for x, y in zip(given, towards, strict=True)]
    storages = [x.data_ptr() for x in given]
    lerp_(given, towards, 0.125)
    assert all(torch.equal(x, y) for x, y in zip(given, expected, strict=True))
    assert [x.data_ptr() for x in given] == storages
