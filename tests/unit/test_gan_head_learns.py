"""A discriminator on the shipped teacher's features learns at its own rate, and not at the fake score's."""

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

from distill.config import compose_config
from distill.data.moving_shapes import MovingShapes
from distill.schedules import add_noise, denoise
from models.additions.gan_head import GanHead
from models.families.wan import Wan

CLIPS, TRAINED = 512, 384
CHUNK = 64


@pytest.fixture(scope="module")
def features():
    """(of clips, of the teacher's samples in one step): behind each of the head's blocks, at times all over (0, 1)."""
    torch.manual_seed(0)
    network = WanTransformer3DModel.from_pretrained("assets/quickstart_teacher/transformer").eval()
    data = MovingShapes(encoders="assets/quickstart_teacher")
    items = [data[i] for i in range(CLIPS)]
    clips, text = (torch.stack([item[key] for item in items]) for key in ("latents", "text"))
    kept = []
    head = GanHead(Wan(), dict(network.config))
    for block in head.blocks:
        network.blocks[block].register_forward_hook(lambda _m, _a, output: kept.append(output))

    def velocity(x, t):
        return network(x, 1000 * t, text[at], return_dict=False)[0]

    found = ([], [])
    with torch.no_grad():
        for at in torch.arange(CLIPS).split(CHUNK):
            noise, one = torch.randn(2, len(at), *clips.shape[1:]), torch.ones(len(at))
            samples = denoise(noise[0], velocity(noise[0], one), one)
            t = torch.rand(len(at))
            for x, into in zip((clips[at], samples), found, strict=True):
                kept.clear()
                velocity(add_noise(x, noise[1], t), t)
                into.append(list(kept))
    return dict(network.config), *([torch.cat(behind) for behind in zip(*chunks, strict=True)] for chunks in found)


def accuracy(features, lr, updates):
    """Of held-out clips and samples, after ``updates`` of the discriminator's loss with the recipe's Adam."""
    config, real, fake = features
    settings = compose_config(["experiment=wan2_1_t2v_1_3b_dmd2"]).optim.fake
    torch.manual_seed(1)
    head = GanHead(Wan(), config)
    adamw = torch.optim.AdamW(head.parameters(), lr=lr, betas=tuple(settings.betas), weight_decay=settings.weight_decay)
    for _ in range(updates):
        chosen = torch.randint(TRAINED, (8,))
        on_real, on_fake = (head([behind[chosen] for behind in each]).mean(1) for each in (real, fake))
        (F.softplus(-on_real) + F.softplus(on_fake)).mean().backward()
        adamw.step()
        adamw.zero_grad()
    with torch.no_grad():
        on_real, on_fake = (head([behind[TRAINED:] for behind in each]).mean((1, 2)) for each in (real, fake))
    return torch.cat([on_real > 0, on_fake < 0]).double().mean().item()


@pytest.mark.long
def test_the_head_learns_at_its_default_rate_where_the_fake_scores_leaves_it_at_chance(features):
    optim = compose_config(["experiment=wan2_1_t2v_1_3b_dmd2"]).optim.fake
    assert (optim.lr, optim.additions_lr) == (4e-7, 1e-5)
    assert accuracy(features, optim.additions_lr, 1500) > 0.65, "long before the 5000 of the line below"
    assert accuracy(features, optim.lr, 5000) < 0.56
