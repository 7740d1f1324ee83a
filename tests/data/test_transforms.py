"""`Images` against a slow reference that pads, crops and flips one example at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.transforms import Images
from fedexp.errors import UsageError

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def pixels(*shape: int, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    return torch.from_numpy(drawn)


def slow_normalise(x: Tensor) -> NDArray[np.float64]:
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (MEAN, STD))
    return np.asarray((x.numpy() / 255.0 - mean) / std)


def slow_train(x: Tensor, draws: NDArray[np.int64], pad: int) -> NDArray[np.float64]:
    """Normalise, pad with zeros, crop and flip, one example at a time."""
    results = []
    for image, (dy, dx, flip) in zip(slow_normalise(x), draws, strict=True):
        height, width = image.shape[1:]
        padded = np.zeros((3, height + 2 * pad, width + 2 * pad))
        padded[:, pad : pad + height, pad : pad + width] = image
        crop = padded[:, dy : dy + height, dx : dx + width]
        results.append(crop[:, :, ::-1] if flip else crop)
    return np.stack(results)


@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    pad=st.integers(0, 5),
    augment=st.sampled_from(["example", "batch"]),
    flip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_equals_the_slow_reference(
    height: int, width: int, pad: int, augment: str, flip: bool, seed: int
) -> None:
    images = Images(MEAN, STD, augment, pad, flip)  # type: ignore[arg-type]
    x = pixels(6, 3, height, width, seed=seed)
    draws = images.draw(np.random.default_rng(seed), 6)
    assert draws is not None
    after = images.train({"x": x, "y": torch.arange(6)}, draws)
    assert after["x"].dtype == torch.float32
    assert after["y"].tolist() == list(range(6))
    expected = slow_train(x, draws, pad)
    np.testing.assert_allclose(after["x"].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_every_shift_and_both_flips_equal_the_reference() -> None:
    images = Images(MEAN, STD, pad=2)
    draws = np.array([(y, x, f) for y in range(5) for x in range(5) for f in range(2)])
    x = pixels(50, 3, 4, 6)
    after = images.train({"x": x}, draws)["x"].numpy()
    np.testing.assert_allclose(after, slow_train(x, draws, 2), rtol=1e-5, atol=1e-6)


def test_the_padding_is_the_mean_colour() -> None:
    black = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    after = Images(MEAN, STD).train({"x": black}, np.array([[0, 4, 0]]))["x"]
    assert after[0, :, :4].eq(0).all()
    assert after[0, :, 4:].lt(-1).all()


def test_evaluation_normalises_only() -> None:
    x = pixels(3, 3, 5, 5)
    np.testing.assert_allclose(
        Images(MEAN, STD).evaluate({"x": x})["x"].numpy(), slow_normalise(x), rtol=1e-5, atol=1e-6
    )


def test_mean_0_and_std_1_give_exactly_the_pixels_over_255() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    after = Images((0.0,), (1.0,), augment=None).evaluate({"x": x})["x"]
    assert torch.equal(after, x.float() / 255)


def test_draws_cover_every_shift_and_flip_with_probability_one_half() -> None:
    draws = Images(MEAN, STD).draw(np.random.default_rng(0), 20_000)
    assert draws is not None
    for column in (0, 1):
        counts = np.bincount(draws[:, column], minlength=9)
        assert len(counts) == 9
        assert counts.min() > 0.9 * 20_000 / 9
    assert abs(draws[:, 2].mean() - 0.5) < 0.02


def test_one_draw_per_batch_or_per_example() -> None:
    rng = np.random.default_rng
    batch = Images(MEAN, STD, "batch").draw(rng(1), 50)
    example = Images(MEAN, STD, "example").draw(rng(1), 50)
    assert batch is not None
    assert example is not None
    assert len(np.unique(batch, axis=0)) == 1
    assert len(np.unique(example, axis=0)) > 20
    assert batch.shape == example.shape == (50, 3)


def test_draws_are_a_pure_function_of_the_generator() -> None:
    images = Images(MEAN, STD)
    first, second = (images.draw(np.random.default_rng(7), 9) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_without_augmentation_nothing_is_drawn() -> None:
    rng = np.random.default_rng(0)
    images = Images(MEAN, STD, augment=None)
    assert images.draw(rng, 4) is None
    assert rng.random() == np.random.default_rng(0).random()
    x = pixels(4, 3, 5, 5)
    assert torch.equal(images.train({"x": x}, None)["x"], images.evaluate({"x": x})["x"])


def test_the_batch_is_not_modified() -> None:
    x = pixels(4, 3, 8, 8)
    batch, before = {"x": x}, x.clone()
    images = Images(MEAN, STD)
    images.train(batch, images.draw(np.random.default_rng(0), 4))
    images.evaluate(batch)
    assert batch["x"] is x
    assert torch.equal(x, before)


def test_leading_dimensions_are_clients() -> None:
    images = Images(MEAN, STD)
    x = pixels(2, 5, 3, 8, 8)
    draws = images.draw(np.random.default_rng(0), 10)
    assert draws is not None
    stacked = images.train({"x": x}, torch.from_numpy(draws.reshape(2, 5, 3)))["x"]
    flat = images.train({"x": x.flatten(0, 1)}, draws)["x"]
    assert torch.equal(stacked.flatten(0, 1), flat)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "per channel"),
        ({"std": (0.5, 0.0, 0.5)}, "must not be zero"),
        ({"augment": "exmaple"}, "augment is one of"),
        ({"pad": -1}, "negative"),
    ],
)
def test_wrong_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Images(**{"mean": MEAN, "std": STD, **options})


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4), pixels(2, 1, 4, 4), pixels(2, 4, 4, 3)])
def test_other_types_and_channels_are_refused(x: Tensor) -> None:
    with pytest.raises(UsageError, match="give pixels as uint8"):
        Images(MEAN, STD).evaluate({"x": x})


def test_draws_for_another_batch_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit"):
        Images(MEAN, STD).train({"x": pixels(2, 3, 4, 4)}, np.zeros((3, 3), dtype=np.int64))
