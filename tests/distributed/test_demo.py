"""Clips on demand: all ranks sample what a thread of rank 0 orders, without gradio."""

import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.demo.studio import Made, Order, Studio
from distill.evaluate.networks import chosen_network, settings_of_run
from distill.evaluate.sampling import StreamDecoder, decoded
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import mesh_of_shape
from models.sample import Sample
from tests.unit.test_sample_command import write_causal_run

CPU = torch.device("cpu")
ORDER = Order(caption="a red circle growing", steps={"student": 2}, seed=3, frames=8)


def _customer(studio: Studio, got: dict) -> None:
    """Order clips one after another, and then end the studio as a signal does."""

    def chunks(order, most=99):
        stopped, made = threading.Event(), []
        for reply in studio.clips(order, stopped):
            if isinstance(reply, Made) and reply.latents is not None:
                made.append(reply.latents)
                if len(made) == most:
                    stopped.set()
        return made

    for name, order in (
        ("words", {"caption": "a red bicycle"}),
        ("empty", {"caption": " "}),
        ("length", {"frames": 7}),
    ):
        try:
            got[name] = chunks(Order(**vars(ORDER) | order))
        except UserError as error:
            got[name] = str(error)
    got["stopped"] = chunks(replace(ORDER, frames=2000), 1)
    closed = studio.clips(ORDER, threading.Event())  # a tab that is closed in the middle of its clip
    next(closed)
    waiting = studio.clips(ORDER, threading.Event())
    got["ahead"] = next(waiting)
    closed.close()
    got["whole"] = [reply.latents for reply in waiting if isinstance(reply, Made) and reply.latents is not None]
    studio.signal.received = signal.SIGTERM


def _served(run: Path, folder: Path) -> dict:
    config = settings_of_run(run, None, 2)
    network = chosen_network(config, "student")
    mesh = mesh_of_shape(network.plan.mesh, device_type="cpu")
    data = config.data.build(seed=config.seed, device=CPU, run_dir=run)
    studio = Studio({"student": network}, data=data, mesh=mesh, device=CPU, folder=folder)
    got: dict = {}
    customer = threading.Thread(target=_customer, args=(studio, got), daemon=True)
    if rank() == 0:
        customer.start()
    studio.serve()
    if rank() == 0:
        customer.join()
    sampler = network.loaded(mesh=mesh, device=CPU, data=data)
    shapes = network.shapes(8, "length")
    got["truth"] = sampler.generate("student", [ORDER.caption], steps=2, seed=3, latent_shapes=shapes)
    got["decoded"] = decoded(data, got["truth"]).frames
    stream = StreamDecoder(data)
    got["streamed"] = [stream.decode(chunk).frames for chunk in got.get("whole", [])]
    return got


@pytest.mark.slow
def test_all_ranks_sample_what_one_is_asked_for(pools, tmp_path):
    run = write_causal_run(tmp_path)
    got, other = pools[2].run(_served, run, tmp_path)
    assert "bicycle" in got["words"] and "empty" in got["empty"] and "length 7" in got["length"]
    assert len(got["stopped"]) < 100 and len(got["whole"]) == 4
    clip = Sample.cat(got["whole"], dim=2).video
    assert torch.equal(clip, got["truth"].video) and torch.equal(clip[:, :, :2], got["stopped"][0].video)
    assert torch.equal(got["truth"].video, other["truth"].video)
    assert got["ahead"] == 1
    assert sum(piece.shape[1] for piece in got["streamed"]) == 8
    assert all((a == b).all() for a, b in zip(got["streamed"], got["decoded"].reshape(4, 1, 2, 16, 16, 3), strict=True))
