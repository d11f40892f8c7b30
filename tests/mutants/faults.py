"""Single-place faults that the tests must catch, each with the test that fails under it.

``old`` occurs exactly once in the product. Update an entry when you move or rewrite its code: it must still make the
same fault.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: replacing ``old`` by ``new`` makes it."""

    name: str
    room: str
    """Part of the product that it is in."""
    harm: str
    """What a user would suffer from it."""
    old: str
    new: str
    killed_by: str
    """Pytest node id below ``tests/`` of a test that fails under the fault."""


FAULTS = (
    Fault(
        name="empty_rows_grad",
        room="attention: masks",
        harm="a sample whose keys are all masked gets NaN in dQ, dK, dV (-inf - -inf)",
        old="            lse_own = lse_own.masked_fill(lse_own == -torch.inf, torch.inf)\n",
        new="            pass\n",
        killed_by="",
    ),
    Fault(
        name="ring_dq_dtype",
        room="attention: backward of the ring",
        harm="bf16: dQ is summed over the ring's chunks in bf16; the error grows with the ring",
        old="return torch.zeros_like(prepared[0][1], dtype=sums, memory_format=torch.contiguous_format)",
        new="return torch.zeros_like(prepared[0][1], dtype=q.dtype, memory_format=torch.contiguous_format)",
        killed_by="",
    ),
    Fault(
        name="ulysses_head_order",
        room="attention: ulysses, head groups",
        harm="attention.head_groups > 1: heads come back in another order than they went",
        old='rearrange(x[..., i, :, :], "g p b s h d -> b s (p g h) d")',
        new='rearrange(x[..., i, :, :], "g p b s h d -> b s (g p h) d")',
        killed_by="",
    ),
    Fault(
        name="dual_merge_shift",
        room="attention: tangents",
        harm="rcm, scm, meanflow on a ring: the exact derivative of attention is wrong",
        old="            shift = w * (1 - w) * (part.t_lse - t_s).transpose(1, 2).unsqueeze(-1)\n",
        new="            shift = w * (part.t_lse - t_s).transpose(1, 2).unsqueeze(-1)\n",
        killed_by="",
    ),
    Fault(
        name="cross_partial_grad",
        room="gradients: sums over cp",
        harm="split text: each rank keeps the gradient of keys and values from its own queries alone",
        old="k, v = gather_tokens(torch.stack((k, v)), mesh, total, 2, partial_grad=True).unbind()",
        new="k, v = gather_tokens(torch.stack((k, v)), mesh, total, 2).unbind()",
        killed_by="",
    ),
    Fault(
        name="clip_first_expert",
        room="gradients: clip norm",
        harm="steps that train both experts clip by (and log) the first one's norm",
        old="norm = grad_norm(chain.from_iterable(self.trained[part].parameters() for part in parts))",
        new="norm = grad_norm(self.trained[parts[0]].parameters())",
        killed_by="",
    ),
    Fault(
        name="reduce_in_bf16",
        room="sharding: mixed precision",
        harm="reduce_dtype=auto under bf16 sums gradients over ranks in bf16",
        old='    return torch.float64 if settings.precision == "fp64" else torch.float32\n',
        new="    return COMPUTE_DTYPE[settings.precision]\n",
        killed_by="",
    ),
    Fault(
        name="time_embedder_bf16",
        room="sharding: mixed precision",
        harm="bf16: Wan's time embedder computes in bf16, times of 1000 are rounded to 4",
        old="((full_precision_units, full_dtype), (units, compute_dtype), ((model,), compute_dtype))",
        new="((full_precision_units, compute_dtype), (units, compute_dtype), ((model,), compute_dtype))",
        killed_by="",
    ),
    Fault(
        name="gradient_scale_twice",
        room="sharding: gradient scale",
        harm="one rank or no_shard with gradient_scale: gradients are scaled by its square",
        old="factor = 1 / settings.gradient_scale if shard_size > 1 else settings.gradient_scale**-0.5",
        new="factor = 1 / settings.gradient_scale",
        killed_by="",
    ),
    Fault(
        name="fake_not_frozen",
        room="sharding: frozen roles",
        harm="DMD2 with a GAN: the student's loss leaves gradients (and their memory) in the fake score",
        old='return ("fake",) if self.settings.gan and self.trained_role(step) == "student" else ()',
        new="return ()",
        killed_by="",
    ),
    Fault(
        name="accumulate_syncs_first",
        room="sharding: accumulation",
        harm="optim_grads holds unsharded gradients over a whole step: memory of ZeRO-1 where ZeRO-2 was asked for",
        old='    reduces = last or settings.strategy in ("optim_grads", "optim_grads_params")\n',
        new='    reduces = last or settings.strategy == "optim_grads_params"\n',
        killed_by="",
    ),
    Fault(
        name="shared_integer_by_position",
        room="randomness: the shared integer",
        harm="ranks draw rollouts of other lengths: a deadlock, or other losses on another mesh",
        old="generator=stream(self.seed, purpose, self.step, *part)))",
        new="generator=stream(self.seed, purpose, self.step, *self.positions[:1], *part)))",
        killed_by="",
    ),
    Fault(
        name="dmd_sign",
        room="methods: dmd2 sign",
        harm="the student is pushed away from the teacher",
        old="        g = (estimate - real) / per_sample(q, sample)\n",
        new="        g = (real - estimate) / per_sample(q, sample)\n",
        killed_by="",
    ),
    Fault(
        name="guidance_base",
        room="methods: guidance",
        harm="guidance is one stronger than asked for, everywhere (teacher, samples, trajectories)",
        old="    return unconditional + w * (conditional - unconditional)\n",
        new="    return conditional + w * (conditional - unconditional)\n",
        killed_by="",
    ),
    Fault(
        name="renoise_repeats",
        room="methods: renoise",
        harm="every step of a rollout and of a sample gets the same noise: the student learns to rely on it",
        old='random.normal(f"{purpose}_{k + 1}", x.shape[1:], x.dtype)',
        new="random.normal(purpose, x.shape[1:], x.dtype)",
        killed_by="",
    ),
    Fault(
        name="rcm_turn",
        room="methods: fake schedule",
        harm="rCM trains the student four steps of five and the fake score one",
        old='return "student" if joint < 0 or joint % self.settings.student_every == 0 else "fake"',
        new='return "student" if joint < 0 or joint % self.settings.student_every != 0 else "fake"',
        killed_by="",
    ),
    Fault(
        name="gan_labels",
        room="methods: gan label",
        harm="the discriminator learns to call samples real",
        old="        loss = (F.softplus(student) + F.softplus(-real)).mean(1)\n",
        new="        loss = (F.softplus(-student) + F.softplus(real)).mean(1)\n",
        killed_by="",
    ),
    Fault(
        name="scm_warmup",
        room="methods: scm terms",
        harm="the unstable part of the tangent is there from the first step: no warm-up",
        old="    return -cos.square() * (prediction - teacher) - r * (cos * sin * x + derivative)\n",
        new="    return -cos.square() * (prediction - teacher) - (r * cos * sin * x + derivative)\n",
        killed_by="",
    ),
    Fault(
        name="meanflow_sign",
        room="methods: meanflow terms",
        harm="the student learns another field; looks like a slow run",
        old="            target = velocity - growth * per_sample(t - r, x) * derivative\n",
        new="            target = velocity + growth * per_sample(t - r, x) * derivative\n",
        killed_by="",
    ),
    Fault(
        name="ema_counts_steps",
        room="EMA",
        harm="DMD2's student average counts the steps of both roles: start and the power schedule are 6 times too fast",
        old="                self.averages[part].update(self.updates[part])\n",
        new="                self.averages[part].update(self.step)\n",
        killed_by="",
    ),
    Fault(
        name="lr_over_steps",
        room="optimizer: lr schedule",
        harm="of two roles the cosine of each never comes down: it spans the steps of both",
        old="rates = {part: learning_rate(settings, self.updates[part], self.planned_updates[part]) for part in parts}",
        new="rates = {part: learning_rate(settings, self.updates[part], self.config.steps) for part in parts}",
        killed_by="",
    ),
    Fault(
        name="adam_beta2",
        room="optimizer: betas",
        harm="Adam's second moment forgets as fast as the first",
        old="                beta2=float(self.settings.betas[1]),\n",
        new="                beta2=float(self.settings.betas[0]),\n",
        killed_by="",
    ),
    Fault(
        name="decay_scaled_group",
        room="optimizer: weight decay",
        harm="optim.ROLE.no_decay is read, checked, and without effect",
        old="self._update(lr * group.lr_scale, group.weight_decay, {name: named[name] for name in given})",
        new="self._update(lr * group.lr_scale, self.settings.weight_decay, {name: named[name] for name in given})",
        killed_by="",
    ),
    Fault(
        name="resume_position_by_step",
        room="resume: sampler position",
        harm="a run resumed with another batch_size sees clips twice and skips others",
        old="            first_sample=self.samples,\n",
        new="            first_sample=self.step * self.config.batch_size,\n",
        killed_by="",
    ),
    Fault(
        name="resume_forgets_updates",
        room="resume: update counts",
        harm="after a resume warm-up, cosine and EMA schedule begin anew, and the next checkpoint has the wrong counts",
        old=(
            '    for name in ("updates", "skipped", "unlogged"):\n        setattr(trainer, name, dict(state[name]))\n'
        ),
        new=('    for name in ("skipped", "unlogged"):\n        setattr(trainer, name, dict(state[name]))\n'),
        killed_by="",
    ),
    Fault(
        name="publish_before_manifest",
        room="checkpoints: atomicity",
        harm="a run killed in between has a checkpoint with its name and without its state",
        old=(
            "        files[STATE] = _write(unfinished / STATE, state)\n"
            '        _write(unfinished / MANIFEST, json.dumps({"files": files}, indent=1))\n'
            "        _sync(unfinished)\n"
            "        if target.exists():\n"
            "            leave(target)\n"
            "        unfinished.rename(target)\n"
        ),
        new=(
            "        if target.exists():\n"
            "            leave(target)\n"
            "        unfinished.rename(target)\n"
            "        files[STATE] = _write(target / STATE, state)\n"
            '        _write(target / MANIFEST, json.dumps({"files": files}, indent=1))\n'
            "        _sync(target)\n"
        ),
        killed_by="",
    ),
    Fault(
        name="lock_shared",
        room="locks",
        harm="two runs write into one folder and overwrite each other's checkpoints",
        old="fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        killed_by="",
    ),
    Fault(
        name="no_antialias",
        room="clips: resize",
        harm="large reductions alias; thin lines flicker in the training data",
        old='mode="bicubic", antialias=True, align_corners=False)',
        new='mode="bicubic", antialias=False, align_corners=False)',
        killed_by="",
    ),
    Fault(
        name="rotation_other_way",
        room="clips: rotation",
        harm="portrait clips of phones stand on their heads",
        old="        rgb_HWC = torch.rot90(rgb_HWC, turns % 4, dims=(0, 1))\n",
        new="        rgb_HWC = torch.rot90(rgb_HWC, -turns % 4, dims=(0, 1))\n",
        killed_by="",
    ),
    Fault(
        name="text_mask_one_more",
        room="text: mask",
        harm="Hunyuan attends to one token of nothing behind each quotation",
        old='            "glyph_mask": torch.arange(GLYPH_TOKENS) < glyphs.shape[0],\n',
        new='            "glyph_mask": torch.arange(GLYPH_TOKENS) <= glyphs.shape[0],\n',
        killed_by="",
    ),
    Fault(
        name="ltx_shift",
        room="families: LTX coordinates",
        harm="LTX 0.9.5 and later: all frames but the first are a frame too early in the rotary embedding",
        old="        shift = (self.temporal - 1) / clip.fps if self.later else 0.0\n",
        new="        shift = self.temporal / clip.fps if self.later else 0.0\n",
        killed_by="",
    ),
    Fault(
        name="hunyuan_mask_order",
        room="families: Hunyuan masks",
        harm="the caption's mask lies over the quotations and the other way round",
        old="torch.cat([masks[0].new_ones(image.shape[:2]), *masks[::-1]], dim=1)",
        new="torch.cat([masks[0].new_ones(image.shape[:2]), *masks], dim=1)",
        killed_by="",
    ),
    Fault(
        name="lora_scale",
        room="LoRA: scale",
        harm="adapters act rank times weaker in training than in what is exported",
        old="        lora_alpha=settings.rank * settings.scale,",
        new="        lora_alpha=settings.scale,",
        killed_by="",
    ),
    Fault(
        name="wan_lora_alpha",
        room="LoRA: export keys",
        harm="ComfyUI applies the adapters many times too strongly",
        old='tensors[f"{prefix}.alpha"] = torch.tensor(scale * value.shape[0], dtype=torch.float32)',
        new='tensors[f"{prefix}.alpha"] = torch.tensor(scale * value.shape[1], dtype=torch.float32)',
        killed_by="",
    ),
    Fault(
        name="merge_without_scale",
        room="LoRA: merge",
        harm="alpha other than the rank: the merged network is not the one that was trained",
        old="        return weight.to(dtype) + self.scale * (self.own(b).to(dtype) @ self.own(a).to(dtype))\n",
        new="        return weight.to(dtype) + (self.own(b).to(dtype) @ self.own(a).to(dtype))\n",
        killed_by="",
    ),
    Fault(
        name="scheduler_stochastic",
        room="export: scheduler config",
        harm="the exported scheduler samples the student in the other way than it was trained",
        old='        stochastic = self.settings.student_sampler == "renoise"\n',
        new='        stochastic = self.settings.student_sampler == "ode"\n',
        killed_by="",
    ),
    Fault(
        name="staging_without_ema",
        room="planner: a missing term",
        harm="the plan's host memory lacks the average: a host that is too small is called fitting",
        old='    saved = ("parameters", "optimizer", "ema", HOST)\n',
        new='    saved = ("parameters", "optimizer", HOST)\n',
        killed_by="",
    ),
    Fault(
        name="sweep_counts_warm_up",
        room="sweep",
        harm="a warm-up step counts in tokens/s",
        old='chosen = [record for record in records if warm_up < record["step"] <= warm_up + measured]',
        new='chosen = [record for record in records if warm_up <= record["step"] <= warm_up + measured]',
        killed_by="",
    ),
    Fault(
        name="refusal_exit_code",
        room="command line: exit code",
        harm="schedulers that restart on 1 and give up on 2 restart a user's mistake for ever",
        old=("    print(line, file=sys.stderr)\n    return 2\n"),
        new=("    print(line, file=sys.stderr)\n    return 1\n"),
        killed_by="",
    ),
    Fault(
        name="refused_run_leaves_folder",
        room="command line: writes before refusal",
        harm="a dry run, or a run that is refused later, leaves an empty folder behind",
        old=("    refuse_foreign(plan.run_dir)\n    if config.dry_run:\n"),
        new=(
            "    refuse_foreign(plan.run_dir)\n"
            "    plan.run_dir.mkdir(parents=True, exist_ok=True)\n"
            "    if config.dry_run:\n"
        ),
        killed_by="",
    ),
)
