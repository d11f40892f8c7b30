"""Networks with the random numbers of a seed."""

import torch


def seeded(make, seed=0):
    """Return ``make()`` with the random numbers of ``seed``; torch's own state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def random_network(make, seed=0):
    """Return the network ``make()`` with random biases too: constructors leave them at 0, which would hide errors."""

    def made():
        network = make()
        for parameter in network.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        return network

    return seeded(made, seed)


def write_three(folder, make):
    """Write three different random networks, teacher, student and fake, in diffusers layout."""
    for seed, name in enumerate(("teacher", "student", "fake")):
        random_network(make, seed).save_pretrained(folder / name)
