"""Self-forcing in one process: rollouts with Python lists as caches, and one backward of the whole clip."""

import torch

from distill.methods.base import Batch
from distill.methods.dmd2 import Dmd2
from distill.methods.self_forcing import SelfForcing
from fsdp_cp.rng import StepRandom
from models.sample import VIDEO, Sample
from tests.oracles.causal_wan import CausalWan


class JointSelfForcing(SelfForcing):
    """The student's losses are DMD2's, on a clip whose chunks all have a graph."""

    _student_losses = Dmd2._student_losses

    def _rollout(self, batch: Batch, _: object, random: StepRandom, last_steps: object = None) -> Sample:
        student, settings, text = self.roles["student"], self.settings, batch.condition.tensors["text"]
        causal, (channels, frames, *size), graph = student.causal, batch.shapes[VIDEO], torch.is_grad_enabled()
        oracle = CausalWan(student.network, causal.chunks(frames), causal.window, causal.sink)
        shared = random.shared_integer("dmd2/rollout_length", 1, len(settings.step_list))
        done = []
        for i, count in enumerate(causal.chunks(frames)):
            if i == 0 and "first_frame" in batch.condition.tensors:
                assert causal.context_time == 0, "the oracle remembers the frame as given"
                done.append(batch.condition.tensors["first_frame"])
                oracle.remember(done[0], text)
                continue
            times, steps = settings.step_list, shared
            if settings.exit == "each":
                steps = random.shared_integer(f"self_forcing/exit/{i}", 1, len(times))
            if i == 0 and settings.step_list_first:
                times = settings.step_list_first
                steps = random.shared_integer("self_forcing/exit_first", 1, len(times))
            if settings.rollout == "full" or (settings.fake_rollout == "full" and not graph):
                steps = len(times)
            x = random.normal(f"self_forcing/noise/{i}", (channels, count, *size), batch.dtype)
            for k, t in enumerate(times[:steps], start=1):
                with torch.set_grad_enabled(graph and k == steps):
                    v = oracle.chunk(x, torch.full((len(x),), t, dtype=x.dtype), text)
                    x0 = x - t * v
                if k < steps:
                    e = random.normal(f"self_forcing/renoise/{i}_{k}", x.shape[1:], x.dtype)
                    x = torch.lerp(x0, e, times[k]) if settings.student_sampler == "renoise" else x0 + times[k] * v
            done.append(x0)
            seen = x0.detach()
            if causal.context_time:
                e = random.normal(f"self_forcing/context/{i}", x.shape[1:], x.dtype)
                seen = torch.lerp(seen, e, causal.context_time)
            oracle.remember(seen, text, causal.context_time)
        return Sample({VIDEO: torch.cat(done, dim=2)})
