"""Samples of a condition: concatenated, picked, moved; what guidance and a dropped caption replace."""

import torch

from models.condition import Condition


def make(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "mask": torch.rand(count, 3, generator=generator) > 0.5,
        "text": torch.randn(count, 3, 5, generator=generator),
        "image": torch.randn(count, 2, 4, 4, generator=generator),
        "ids": torch.arange(count) + 257,
        "fps": torch.full((count, 1), 23.976),
    }
    return Condition(tensors, {"text": torch.full((3, 5), 7.0)}, {"text": torch.zeros(3, 5)})


def test_null_and_empty_replace_the_text_alone():
    condition = make(4)
    assert (condition.null.tensors["text"] == 7).all() and (condition.empty.tensors["text"] == 0).all()
    assert condition.null.tensors["text"].shape == (4, 3, 5)
    for other in (condition.null, condition.empty):
        assert torch.equal(other.tensors["image"], condition.tensors["image"])
        assert torch.equal(other.null.tensors["text"], condition.null.tensors["text"]), "it can be asked again"


def test_samples_are_put_together_picked_and_repeated():
    a, b = make(2), make(3, seed=1)
    both = Condition.cat([a, b])
    assert len(both) == 5 and torch.equal(both[2:].tensors["image"], b.tensors["image"])
    picked = both[torch.tensor([4, 0])]
    assert torch.equal(picked.tensors["text"], torch.stack([b.tensors["text"][2], a.tensors["text"][0]]))
    twice = a.repeat(2)
    assert len(twice) == 4 and torch.equal(twice.tensors["ids"], torch.tensor([257, 258, 257, 258]))


def test_where_chooses_for_each_sample():
    condition = make(3)
    chosen = Condition.where(torch.tensor([True, False, True]), condition.empty, condition)
    assert [bool((text == 0).all()) for text in chosen.tensors["text"]] == [True, False, True]
    assert torch.equal(chosen.tensors["image"], condition.tensors["image"])


def test_given_frames_get_one_noise():
    """Every call and branch sees it; keyframes stay in fp32 until they have it, and their places on the host."""
    condition = make(3)
    assert condition.with_noise(torch.ones).tensors.keys() == condition.tensors.keys()
    given = {"keyframes": torch.randn(3, 4, 2, 5, 6), "keyframe_anchors": torch.tensor([[0, 1]] * 3)}
    condition = Condition({**condition.tensors, **given}, condition.null_values, condition.empty_values)
    noised = condition.with_noise(lambda name, shape: torch.full((3, *shape), 2.0))
    assert noised.tensors["keyframe_noise"].shape == given["keyframes"].shape and "keyframe_noise" not in given
    half = noised.to(torch.bfloat16).null[1:].repeat(2)
    assert half.tensors["keyframes"].dtype == half.tensors["keyframe_noise"].dtype == torch.float32
    assert (half.tensors["keyframe_noise"] == 2).all() and len(half) == 4
    on_meta = noised.to(torch.device("meta"))
    assert on_meta.device.type == "meta" and on_meta.tensors["keyframe_anchors"].device.type == "cpu"


def test_only_floating_point_tensors_take_a_dtype():
    condition = make(2)
    assert condition.dtype == torch.float32 and condition.device == torch.device("cpu")
    half = condition.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.null.tensors["text"].dtype == torch.bfloat16
    assert torch.equal(half.tensors["fps"], condition.tensors["fps"]), "bf16 would make it 24"
    assert half.tensors["mask"].dtype == torch.bool and torch.equal(half.tensors["ids"], condition.tensors["ids"])
