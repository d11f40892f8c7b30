"""Single-place faults that the tests must catch, each with the test that fails under it.

``old`` occurs exactly once in the product. Update an entry when you move or rewrite its code: it must still make the
same fault.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: replacing ``old`` by ``new`` makes it."""

    name: str
    harm: str
    """Consequence for a user."""
    old: str
    new: str
    killed_by: str
    """Pytest node id below ``tests/`` of a test that fails under the fault."""


FAULTS = (
    Fault(
        name="weights_go_to_the_host",
        harm="with compile, activation_offload copies every gathered weight to the host and back",
        old="        stay = {x.untyped_storage()._cdata for x in owned}\n",
        new="        stay = set()\n",
        killed_by="unit/test_activations.py::test_weights_that_a_plain_forward_saves_stay",
    ),
    Fault(
        name="empty_rows_grad",
        harm="a sample whose keys are all masked gets NaN in dQ, dK, dV (-inf - -inf)",
        old="        lse_own = lse_own.masked_fill(lse_own == -torch.inf, torch.inf)\n",
        new="        pass\n",
        killed_by="distributed/test_attention.py::test_values_gradients_and_tangents[1-1]",
    ),
    Fault(
        name="ring_dq_dtype",
        harm="bf16: dQ is summed over the ring's chunks in bf16; the error grows with the ring",
        old="dq = torch.zeros_like(q_own, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)",
        new="dq = torch.zeros_like(q_own, dtype=q.dtype, memory_format=torch.contiguous_format)",
        killed_by="distributed/test_attention.py::test_a_ring_sums_in_fp32",
    ),
    Fault(
        name="ulysses_head_order",
        harm="attention.head_groups > 1: heads come back in another order than they went",
        old='rearrange(x[..., i, :, :], "g p b s h d -> b s (p g h) d")',
        new='rearrange(x[..., i, :, :], "g p b s h d -> b s (g p h) d")',
        killed_by="distributed/test_attention.py::test_values_gradients_and_tangents[1-2]",
    ),
    Fault(
        name="dual_merge_shift",
        harm="rcm, scm, meanflow on a ring: the exact derivative of attention is wrong",
        old="            shift = w * (1 - w) * (other.t_lse - t_s).transpose(1, 2).unsqueeze(-1)\n",
        new="            shift = w * (other.t_lse - t_s).transpose(1, 2).unsqueeze(-1)\n",
        killed_by="distributed/test_attention.py::test_values_gradients_and_tangents[2-1]",
    ),
    Fault(
        name="mask_window",
        harm="causal networks: a chunk sees one chunk of its window too few, unlike when it runs with a cache",
        old="first = 0 if window is None else max(block - window, 0)",
        new="first = 0 if window is None else max(block - window + 1, 0)",
        killed_by="unit/test_attention_layout.py::test_masks_of_causal_networks",
    ),
    Fault(
        name="mask_alone",
        harm="a mask that hides the same keys from all queries: backward counts the hidden keys too",
        old="self.rectangles(ring_rank, ring_rank) == (everything,)",
        new="len(self.rectangles(ring_rank, ring_rank)) == 1",
        killed_by="unit/test_attention_layout.py::test_alone_means_that_every_query_sees_every_key_at_once[1]",
    ),
    Fault(
        name="cached_dq",
        harm="causal networks with a cache: dQ ignores all keys but the new chunk's",
        old="dq = dq_part if dq is None else dq.to(sums).add_(dq_part)",
        new="dq = dq_part",
        killed_by="distributed/test_cached_attention.py::test_attention_to_a_cache[1-1]",
    ),
    Fault(
        name="cross_partial_grad",
        harm="split text: each rank keeps the gradient of keys and values from its own queries alone",
        old="k, v = gather_tokens(torch.stack((k, v)), mesh, keys, 2, partial_grad=True).unbind()",
        new="k, v = gather_tokens(torch.stack((k, v)), mesh, keys, 2).unbind()",
        killed_by="distributed/test_attention.py::test_cross_attention[True]",
    ),
    Fault(
        name="clip_first_expert",
        harm="steps that train both experts clip by (and log) the first one's norm",
        old="norm = grad_norm(chain.from_iterable(network.single.parameters() for network in trained))",
        new="norm = grad_norm(trained[0].single.parameters())",
        killed_by="distributed/test_experts_parity.py::test_two_experts[rcm-{'cp': 2, 'micro_batch_size': 4, 'steps': 4}]",  # noqa: E501
    ),
    Fault(
        name="reduce_in_bf16",
        harm="reduce_dtype=auto under bf16 sums gradients over ranks in bf16",
        old='reduce_dtype = full_dtype if settings.reduce_dtype == "auto"',
        new='reduce_dtype = compute_dtype if settings.reduce_dtype == "auto"',
        killed_by="distributed/test_sharding.py::test_a_role_that_was_idle_first_trains_in_the_same_dtypes",
    ),
    Fault(
        name="time_embedder_bf16",
        harm="bf16: Wan's time embedder computes in bf16, times of 1000 are rounded to 4",
        old="((full_precision_units, full_dtype), (units, compute_dtype), ((model,), compute_dtype))",
        new="((full_precision_units, compute_dtype), (units, compute_dtype), ((model,), compute_dtype))",
        killed_by="distributed/test_sharding.py::test_bf16_compute_keeps_times_masters_and_gradients_in_fp32",
    ),
    Fault(
        name="replicas_by_position",
        harm="DMD2 with a GAN and replicas: gradients of different parameters of the fake score are added up",
        old='reduce_unused=any("gan_head" in role.added for role in roles) and',
        new="reduce_unused=False and",
        killed_by="distributed/test_gan_head.py::test_one_process_is_the_oracle"
        "[{'dp_replicate': 2, 'cp': 2, 'micro_batch_size': 2}]",
    ),
    Fault(
        name="fake_not_frozen",
        harm="DMD2 with a GAN: the student's loss leaves gradients (and their memory) in the fake score",
        old='return ("fake",) if self.settings.gan and self.trained_role(step) == "student" else ()',
        new="return ()",
        killed_by="unit/test_dmd2_gan.py::test_the_fake_score_is_frozen_while_the_student_trains_through_it",
    ),
    Fault(
        name="accumulate_syncs_first",
        harm="optim_grads holds unsharded gradients over a whole step: memory of ZeRO-1 where ZeRO-2 was asked for",
        old='    reduces = last or settings.strategy in ("optim_grads", "optim_grads_params")\n',
        new='    reduces = last or settings.strategy == "optim_grads_params"\n',
        killed_by="distributed/test_microbatch.py::test_gradients_and_collectives_of_micro_batches[optim_grads]",
    ),
    Fault(
        name="shared_integer_by_position",
        harm="ranks draw rollouts of other lengths: a deadlock, or other losses on another mesh",
        old="generator=stream(self.seed, purpose, self.step, *part)))",
        new="generator=stream(self.seed, purpose, self.step, *self.positions[:1], *part)))",
        killed_by="unit/test_dmd2.py::test_rollout_length_is_the_steps_own_and_takes_every_value",
    ),
    Fault(
        name="dmd_sign",
        harm="the student is pushed away from the teacher",
        old="        difference = estimate - real\n",
        new="        difference = real - estimate\n",
        killed_by="unit/test_dmd2.py::test_gradient_on_the_sample_is_g_over_n_b",
    ),
    Fault(
        name="projected_normaliser",
        harm="projection also changes the length of the updates",
        old="        g = difference / per_sample(q, sample)\n",
        new="        q = (sample - estimate + difference).map(lambda part: per_sample_mean(part.abs()))\n"
        "        g = difference / per_sample(q, sample)\n",
        killed_by="unit/test_projection.py::test_the_students_gradient_lacks_the_part_and_keeps_the_normaliser[dmd2]",
    ),
    Fault(
        name="projection_over_the_batch",
        harm="the samples of a rank share one projection: another mesh has other gradients",
        old="    return (x * y).flatten(1).sum(1)\n",
        new="    return (x * y).sum().expand(len(x))\n",
        killed_by="unit/test_projection.py::test_samples_and_parts_do_not_change_each_other",
    ),
    Fault(
        name="projection_over_the_parts",
        harm="the sound's update loses a part along the picture's error",
        old="    inner, squared = d.map(_inner, r), d.map(_inner, d)\n",
        new="    inner, squared = d.map(lambda _: d.map(_inner, r).total({})), d.map(_inner, d)\n",
        killed_by="unit/test_projection.py::test_samples_and_parts_do_not_change_each_other",
    ),
    Fault(
        name="guidance_base",
        harm="guidance is one stronger than asked for, everywhere (teacher, samples, trajectories)",
        old="    return unconditional + w * (conditional - unconditional)\n",
        new="    return conditional + w * (conditional - unconditional)\n",
        killed_by="unit/test_dmd2.py::test_gradient_on_the_sample_is_g_over_n_b",
    ),
    Fault(
        name="renoise_repeats",
        harm="every step of a rollout and of a sample gets the same noise: the student learns to rely on it",
        old='noise_like(x, random, f"{purpose}_{k}")',
        new="noise_like(x, random, purpose)",
        killed_by="unit/test_dmd2.py::test_rollout_follows_backward_simulation",
    ),
    Fault(
        name="rcm_turn",
        harm="rCM trains the student four steps of five and the fake score one",
        old='return "student" if joint < 0 or joint % self.settings.student_every == 0 else "fake"',
        new='return "student" if joint < 0 or joint % self.settings.student_every != 0 else "fake"',
        killed_by="unit/test_rcm.py::test_whose_turn_it_is",
    ),
    Fault(
        name="gan_labels",
        harm="the discriminator learns to call samples real",
        old="        loss = (F.softplus(student) + F.softplus(-real)).mean(1)\n",
        new="        loss = (F.softplus(-student) + F.softplus(real)).mean(1)\n",
        killed_by="unit/test_dmd2_gan.py::test_head_loss_and_its_gradient",
    ),
    Fault(
        name="scm_warmup",
        harm="the unstable part of the tangent is there from the first step: no warm-up",
        old="(prediction - teacher) - r * (per_sample(cos * sin, x) * x + derivative)\n",
        new="(prediction - teacher) - (per_sample(r * cos * sin, x) * x + derivative)\n",
        killed_by="unit/test_scm.py::test_loss_and_gradient_equal_the_dense_reference",
    ),
    Fault(
        name="meanflow_sign",
        harm="the student learns another field; looks like a slow run",
        old="            target = velocity - growth * per_sample(t - r, x) * derivative\n",
        new="            target = velocity + growth * per_sample(t - r, x) * derivative\n",
        killed_by="unit/test_meanflow.py::test_gradient_equals_a_dense_reference",
    ),
    Fault(
        name="ema_counts_steps",
        harm="DMD2's student average counts the steps of both roles: start and the power schedule are 6 times too fast",
        old="            self.average.update(self.updates)\n",
        new="            self.average.update(6 * self.updates)\n",
        killed_by="distributed/test_parity.py::test_dmd2_in_fp32[{'dp_shard': 2}]",
    ),
    Fault(
        name="lr_over_steps",
        harm="of two roles the cosine of each never comes down: it spans the steps of both",
        old="name=name, updates=counts[role.name, index])",
        new="name=name, updates=config.steps)",
        killed_by="distributed/test_nan.py::test_one_bad_step_is_skipped_on_all_ranks",
    ),
    Fault(
        name="adam_beta2",
        harm="Adam's second moment forgets as fast as the first",
        old="            beta2=float(self.settings.betas[1]),\n",
        new="            beta2=float(self.settings.betas[0]),\n",
        killed_by="unit/test_optimizers.py::test_updates_equal_torch_adamw_with_a_changing_rate",
    ),
    Fault(
        name="decay_scaled_group",
        harm="optim.ROLE.no_decay is read, checked, and without effect",
        old="self._update(lr * group.lr_scale, group.weight_decay, trained, scale)",
        new="self._update(lr * group.lr_scale, self.settings.weight_decay, trained, scale)",
        killed_by="distributed/test_optimizer_groups.py::test_groups_on_shards_equal_plain_adamw[sizes0-optim_grads_params]",
    ),
    Fault(
        name="resume_position_by_step",
        harm="a run resumed with another batch_size sees clips twice and skips others",
        old="            first_sample=self.samples,\n",
        new="            first_sample=self.step * self.config.batch_size,\n",
        killed_by="distributed/test_resume.py::test_another_batch_size",
    ),
    Fault(
        name="resume_forgets_updates",
        harm="after a resume warm-up, cosine and EMA schedule start over, and the next checkpoint has the wrong counts",
        old="            self.trained[name].updates = count\n",
        new="            pass\n",
        killed_by="distributed/test_resume.py::test_same_mesh_bit_by_bit[fp32]",
    ),
    Fault(
        name="publish_before_state",
        harm="a run killed in between has a checkpoint with its name and without its state",
        old=(
            '        with (unfinished / STATE).open("w") as stream:\n'
            "            stream.write(state)\n"
            "            stream.flush()\n"
            "            os.fsync(stream.fileno())\n"
            "        _sync(unfinished)\n"
            "        if target.exists():\n"
            "            leave(target)\n"
            "        unfinished.rename(target)\n"
        ),
        new=(
            "        if target.exists():\n"
            "            leave(target)\n"
            "        unfinished.rename(target)\n"
            "        (target / STATE).write_text(state)\n"
            "        _sync(target)\n"
        ),
        killed_by="distributed/test_checkpoints.py::test_a_checkpoint_is_published_whole_and_all_ranks_see_its_damage",
    ),
    Fault(
        name="lock_shared",
        harm="two runs write into one folder and overwrite each other's checkpoints",
        old="fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        killed_by="unit/test_run_folder.py::test_a_lock_is_taken_once_at_a_time",
    ),
    Fault(
        name="no_antialias",
        harm="large reductions alias; thin lines flicker in the training data",
        old='mode="bicubic", antialias=True, align_corners=False)',
        new='mode="bicubic", antialias=False, align_corners=False)',
        killed_by="unit/test_clips.py::test_reduction_averages_thin_lines",
    ),
    Fault(
        name="rotation_other_way",
        harm="portrait clips of phones stand on their heads",
        old="for dim, sign in ((0, b + d), (1, a + c)) if sign < 0]",
        new="for dim, sign in ((0, a + c), (1, b + d)) if sign < 0]",
        killed_by="unit/test_users_clips.py::test_the_whole_display_matrix_is_applied",
    ),
    Fault(
        name="text_mask_one_more",
        harm="Hunyuan attends to one empty token after each quotation",
        old="                tensors[self.text_masks[name]] = torch.arange(most) < len(texts[name])\n",
        new="                tensors[self.text_masks[name]] = torch.arange(most) <= len(texts[name])\n",
        killed_by="unit/test_hunyuan_encoders.py::test_texts_are_those_of_the_pipeline_where_they_count",
    ),
    Fault(
        name="ltx_shift",
        harm="LTX 0.9.5 and later: all frames but the first are a frame too early in the rotary embedding",
        old="        shift = (self.temporal - 1) / clip.fps if self.later else 0.0\n",
        new="        shift = self.temporal / clip.fps if self.later else 0.0\n",
        killed_by="unit/test_ltx_encoders.py::test_coordinates_are_those_of_the_pipelines",
    ),
    Fault(
        name="hunyuan_mask_order",
        harm="the caption's mask lies over the quotations and the other way round",
        old="torch.cat([image, encoder_attention_mask_2, encoder_attention_mask, video], dim=1)",
        new="torch.cat([image, encoder_attention_mask, encoder_attention_mask_2, video], dim=1)",
        killed_by="distributed/test_families.py::test_two_steps[hunyuan]",
    ),
    Fault(
        name="lora_scale",
        harm="adapters act rank times weaker in training than in what is exported",
        old="            lora_alpha=self.settings.rank * self.settings.scale,",
        new="            lora_alpha=self.settings.scale,",
        killed_by="distributed/test_lora_parity.py::test_dmd2_with_a_shared_base[{'dp_shard': 2, 'cp': 2, 'micro_batch_size': 2}-{}]",  # noqa: E501
    ),
    Fault(
        name="wan_lora_alpha",
        harm="ComfyUI applies the adapters many times too strongly",
        old="torch.tensor(scale * rank, dtype=torch.float32)",
        new='torch.tensor(scale * len(matrices["B.weight"]), dtype=torch.float32)',
        killed_by="distributed/test_lora_checkpoints.py::test_every_format_says_what_the_student_said[wan-lora]",
    ),
    Fault(
        name="merge_without_scale",
        harm="alpha other than the rank: the merged network is not the one that was trained",
        old="        return weight.to(dtype) + scale * difference\n",
        new="        return weight.to(dtype) + difference\n",
        killed_by="distributed/test_lora_checkpoints.py::test_every_format_says_what_the_student_said[merged]",
    ),
    Fault(
        name="scheduler_stochastic",
        harm="the exported scheduler samples the student in the other way than it was trained",
        old='            "stochastic": self.settings.student_sampler == "renoise",\n',
        new='            "stochastic": self.settings.student_sampler != "renoise",\n',
        killed_by="unit/test_scheduler.py::test_methods_give_their_students_scheduler[ode]",
    ),
    Fault(
        name="scheduler_expert",
        harm="a pipeline of two experts runs the expert that was not trained at a time",
        old=" + _CROSSING * crossed\n",
        new="\n",
        killed_by="unit/test_scheduler.py::test_a_pipeline_runs_the_expert_that_was_trained[0.875-times0]",
    ),
    Fault(
        name="forced_noise",
        harm="teacher and fake score see other noise, whose difference drowns that of the scores",
        old="add_noise(real_sample, noise, t)",
        new="add_noise(real_sample, noise.map(lambda part: part.flip(0)), t)",
        killed_by="unit/test_dmd2.py::test_a_forced_teacher_scores_the_clip_with_the_time_and_noise_of_the_fake_score",
    ),
    Fault(
        name="coin_by_part",
        harm="parts of a batch disagree on whether the teacher scores clips",
        old="replace(random, part=0).shared.uniform",
        new="random.shared.uniform",
        killed_by="unit/test_dmd2.py::test_one_coin_decides_for_the_whole_batch_of_a_step",
    ),
    Fault(
        name="black_clips",
        harm="clips that are not finite are written as black ones",
        old="    if not frames.isfinite().all():\n",
        new="    if frames.isinf().all():\n",
        killed_by="unit/test_encoders.py::test_frames_that_are_not_finite_do_not_become_black",
    ),
    Fault(
        name="staging_without_ema",
        harm="the plan's host memory lacks the average: a host that is too small is called fitting",
        old='    saved = ("parameters", "optimizer", "ema", HOST)\n',
        new='    saved = ("parameters", "optimizer", HOST)\n',
        killed_by="unit/test_plan_command.py::test_what_plan_json_holds",
    ),
    Fault(
        name="sinks_stay_behind",
        harm="in long clips the distance to the sinks grows beyond that of training",
        old="            shift=max(0, self.frames - last),\n",
        new="            shift=0,\n",
        killed_by="distributed/test_causal.py::test_velocities_of_one_rank",
    ),
    Fault(
        name="clean_half_at_noisy_times",
        harm="the clean history is read at the times of the noisy half, and not as a cache reads it",
        old="times = torch.cat([torch.full_like(noisy, settings.context_time), noisy], dim=1)",
        new="times = torch.cat([noisy, noisy], dim=1)",
        killed_by="distributed/test_causal.py::test_velocities_of_one_rank",
    ),
    Fault(
        name="evicted_a_chunk_early",
        harm="a cache with a window holds one chunk less than the mask shows",
        old="return earlier < self.sink or self.window is None or earlier >= number - self.window",
        new="return earlier < self.sink or self.window is None or earlier > number - self.window",
        killed_by="distributed/test_causal.py::test_velocities_of_one_rank",
    ),
    Fault(
        name="sinks_moved_in_place",
        harm="a stream moves its sinks by the sum of all distances so far",
        old="keys[:, :moved] = rotate(sinks[:, :moved])",
        new="keys[:, :moved] = rotate(keys[:, :moved])",
        killed_by="distributed/test_causal.py::test_velocities_of_one_rank",
    ),
    Fault(
        name="slot_too_few",
        harm="the new chunk of a stream overwrites the oldest chunk that it sees",
        old="slot = turn if settings.window is None else turn % (settings.window + 1)",
        new="slot = turn if settings.window is None else turn % settings.window",
        killed_by="distributed/test_causal.py::test_velocities_of_one_rank",
    ),
    Fault(
        name="sweep_counts_warm_up",
        harm="a warm-up step counts in tokens/s",
        old='chosen = [record for record in records if warm_up < record["step"] <= warm_up + measured]',
        new='chosen = [record for record in records if warm_up <= record["step"] <= warm_up + measured]',
        killed_by="unit/test_sweep.py::test_what_is_measured",
    ),
    Fault(
        name="refusal_exit_code",
        harm="schedulers that restart on 1 and give up on 2 restart a user's mistake for ever",
        old=("    print(line, file=sys.stderr)\n    return 2\n"),
        new=("    print(line, file=sys.stderr)\n    return 1\n"),
        killed_by="unit/test_export_command.py::test_folders_that_hold_anything_else_are_left_alone",
    ),
    Fault(
        name="refused_run_leaves_folder",
        harm="a dry run, or a run that is refused later, leaves an empty folder",
        old="        refuse_foreign_run(plan.run_dir)\n",
        new=("        refuse_foreign_run(plan.run_dir)\n        plan.run_dir.mkdir(parents=True, exist_ok=True)\n"),
        killed_by="e2e/test_mistakes.py::test_a_dry_run_writes_nothing",
    ),
    Fault(
        name="chunk_gradient_partial",
        harm="self_forcing with a GAN at cp > 1: a rank's part of the clip's gradient is taken for a chunk's gradient",
        old="        dist.all_reduce(whole, group=mesh.cp.get_group())\n",
        new="        pass\n",
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process",
    ),
    Fault(
        name="exit_not_cached",
        harm="the history of the next chunk is not the prediction of the exit step",
        old='        finished = context_chunk(causal, chunk[-1], random, f"{purpose}/{i}")\n',
        new='        finished = context_chunk(causal, x, random, f"{purpose}/{i}")\n',
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process[first step list, sink-{}]",
    ),
    Fault(
        name="cached_dq_dtype",
        harm="bf16: dQ is summed over cached chunks in bf16; the error grows with the cache",
        old="dq = dq_part if dq is None else dq.to(sums).add_(dq_part)",
        new="dq = dq_part if dq is None else dq.add_(dq_part)",
        killed_by="distributed/test_cached_attention.py::test_a_cache_sums_in_fp32",
    ),
    Fault(
        name="samples_per_micro_batch",
        harm="a resumed run repeats clips and draws",
        old="        self.samples += self.config.batch_size\n",
        new="        self.samples += self.batching.micro_batch_size\n",
        killed_by="distributed/test_resume.py::test_another_batch_size",
    ),
    Fault(
        name="unlogged_replaced",
        harm="with log.every > 1 a line lacks the roles that trained before its step",
        old="            self.unlogged |= metrics\n",
        new="            self.unlogged = dict(metrics)\n",
        killed_by="e2e/test_run_folder.py::test_a_start_is_recorded_and_a_finished_run_can_be_exported_again",
    ),
    Fault(
        name="broken_student_exported",
        harm="a broken student is exported as a result, with exit code 0",
        old="            if not math.isfinite(loss):\n                why =",
        new="            if False:\n                why =",
        killed_by="e2e/test_run_folder.py::test_a_run_that_ends_broken_exports_nothing[settings0]",
    ),
    Fault(
        name="export_dtype",
        harm="export.dtype=bf16 writes fp32",
        old='full.to(device="cpu", dtype=dtype)',
        new='full.to(device="cpu")',
        killed_by="e2e/test_run_folder.py::test_a_start_is_recorded_and_a_finished_run_can_be_exported_again",
    ),
    Fault(
        name="ltx_negative_time",
        harm="LTX 0.9.5 and later: the first frame gets a negative position in the rotary embedding",
        old="(frames - spacing[:, 3:]).clamp_min(0)",
        new="(frames - spacing[:, 3:])",
        killed_by="unit/test_ltx_encoders.py::test_coordinates_are_those_of_the_pipelines",
    ),
    Fault(
        name="cached_at_time_0",
        harm="a finished chunk is noised to the context time, and read as if it were clean",
        old="        t = torch.full((len(x0),), self.settings.context_time, dtype=dtype, device=x0.device)\n",
        new="        t = torch.full((len(x0),), 0.0, dtype=dtype, device=x0.device)\n",
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process[first step list, sink-{}]",
    ),
    Fault(
        name="sinks_evicted",
        harm="a cache drops the sinks that the mask of training shows",
        old="return earlier < self.sink or self.window is None",
        new="return self.window is None",
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process[first step list, sink-{}]",
    ),
    Fault(
        name="one_noise_for_all_chunks",
        harm="every chunk of a clip begins with the same noise",
        old='draw_noise(random, f"{purpose}/{i}", {VIDEO',
        new="draw_noise(random, purpose, {VIDEO",
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process[first step list, sink-{}]",
    ),
    Fault(
        name="exit_is_the_last_step",
        harm="the first chunk is always denoised to its last step, and learns there only",
        old="            return chosen[: random.shared_integer(purpose, 1, len(chosen))]\n",
        new="            return chosen\n",
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process[first step list, sink-{}]",
    ),
    Fault(
        name="replayed_backwards",
        harm="a chunk is replayed with the gradient of another one",
        old="            step, gradient = replay.pop(0)\n",
        new="            (step, _), (_, gradient) = replay[0], replay.pop()\n",
        killed_by="distributed/test_self_forcing.py::test_a_mesh_computes_as_one_process[first step list, sink-{}]",
    ),
    Fault(
        name="sound_from_the_containers_start",
        harm="an mp4 whose picture begins late has its sound late by as much",
        old="start = round((piece.pts * piece.time_base - begin) * rate)",
        new="start = round(piece.pts * piece.time_base * rate)",
        killed_by="unit/test_sound.py::test_sound_begins_with_the_first_frame[48000]",
    ),
    Fault(
        name="bucket_remainder",
        harm="with data.buckets, a size of fewer clips than a batch never trains, and others too rarely",
        old="[epochs * clips // self.batch_size for clips in self.buckets]",
        new="[epochs * (clips // self.batch_size) for clips in self.buckets]",
        killed_by="unit/test_order.py::test_every_clip_of_every_bucket_comes_equally_often",
    ),
    Fault(
        name="bucket_enlarges",
        harm="with data.buckets, small clips are enlarged to the size with most pixels",
        old="        if tall >= clip.height and wide >= clip.width:\n",
        new="        if tall and wide:\n",
        killed_by="unit/test_clips.py::test_a_clip_takes_the_size_that_keeps_most_of_it[20-32-46-chosen5]",
    ),
    Fault(
        name="padded_rows_kept",
        harm="zeros that fill a stored embedding up count as tokens",
        old="    text = text[: int(rows[-1]) + 1 if len(rows) else 0]\n",
        new="",
        killed_by="unit/test_outside_sets.py::test_normalized_latents_are_taken_as_they_are[rcm-options0]",
    ),
    Fault(
        name="minimax_h3_audio_time",
        harm="sound rows are modulated by the video's time",
        old="[torch.zeros_like(texts), torch.ones_like(audios), torch.zeros_like(videos)]",
        new="[torch.zeros_like(texts), torch.zeros_like(audios), torch.zeros_like(videos)]",
        killed_by="unit/test_minimax_h3_family.py::test_inputs_are_those_of_diffusers[t2av]",
    ),
    Fault(
        name="minimax_h3_gate_order",
        harm="ComfyUI adds the adapters of gate and value to each other's rows",
        old='torch.cat(matrices["B.weight"].chunk(2)[::-1])',
        new='matrices["B.weight"]',
        killed_by="unit/test_minimax_h3_family.py::test_diffusers_reads_the_adapters_of_the_original_layers[[]]",
    ),
    Fault(
        name="minimax_h3_text_layer",
        harm="captions are embedded by Qwen3-VL's last loaded state, after its norm",
        old="states[TEXT_LAYER][0]",
        new="states[-1][0]",
        killed_by="unit/test_minimax_h3_encoders.py::test_texts_are_those_of_the_pipeline",
    ),
    Fault(
        name="minimax_h3_audio_shift",
        harm="diffusers samples the sound at the video's times",
        old="MiniMaxH3Scheduler(shift=shift * part_shifts[AUDIO])",
        new="MiniMaxH3Scheduler(shift=shift)",
        killed_by="unit/test_minimax_h3_family.py::test_both_parts_have_a_scheduler_of_the_students_times[times0-None]",
    ),
    Fault(
        name="guard_armed",
        harm="the guard raises an alarm for early students, which are bad",
        old="if is_inside and (self.looks == 0 or self.rows[name] > 1) and name not in self.armed:",
        new="if name not in self.armed:",
        killed_by="unit/test_guard.py::test_an_armed_measure_alarms_at_its_second_look_outside[never armed]",
    ),
    Fault(
        name="guard_distance",
        harm="all limits of the guard are as near, and healthy students of meanflow alarm",
        old="return mean + LIMITS[name] * spread",
        new="return mean + (1.25 if LIMITS[name] > 0 else -1.25) * spread",
        killed_by="unit/test_guard.py::test_limits_are_on_one_side",
    ),
    Fault(
        name="index_checksum",
        harm="a changed index of an encoded set gives rows of other clips",
        old="self._read(place.offset, place.size, self._crc32[name])",
        new="self._read(place.offset, place.size, None)",
        killed_by="unit/test_encoded_set.py::test_an_index_that_changes",
    ),
    Fault(
        name="best_deleted",
        harm="retention deletes the checkpoint that guard.action=keep marked as the best",
        old="            if old != best and (",
        new="            if (",
        killed_by="unit/test_checkpoint_folder.py::test_the_newest_and_every_nth_are_kept",
    ),
    Fault(
        name="interval_ties",
        harm="a few prompts that differ from tied ones blow up the interval of their mean",
        old="_MOST_WITHOUT_SPREAD = 0.025",
        new="_MOST_WITHOUT_SPREAD = 1.0",
        killed_by="unit/test_intervals.py::test_a_bound_is_at_least_as_wide_as_students",
    ),
    Fault(
        name="interval_narrow",
        harm="bootstrap-t alone finds differences of nothing at few prompts",
        old="np.where(is_told, np.maximum(upper, of_t), of_t)",
        new="np.where(is_told, upper, of_t)",
        killed_by="unit/test_intervals.py::test_a_bound_is_at_least_as_wide_as_students",
    ),
    Fault(
        name="interval_alike_clips",
        harm="the interval of a share takes the clips of a prompt for independent ones, and is too narrow",
        old="np.clip(effective, count, clips)",
        new="np.clip(effective, clips, clips)",
        killed_by="unit/test_intervals.py::test_the_clips_of_a_share_count_for_as_many_as_they_are_worth",
    ),
    Fault(
        name="interval_of_a_share",
        harm="shares get the interval of a mean, which leaves 0 to 1 and has no width where all clips agree",
        old="seeds if key in SHARES else None",
        new="None",
        killed_by="unit/test_intervals.py::test_a_measure_that_is_a_share_gets_its_interval_from_all_of_its_clips",
    ),
    Fault(
        name="sampled_adapters",
        harm="adapters are sampled as their base, without a word",
        old="lora=settings.lora if trained or saved else None,",
        new="lora=settings.lora if trained else None,",
        killed_by="unit/test_sample_command.py::test_adapters_are_sampled_on_the_teacher",
    ),
    Fault(
        name="another_reference",
        harm="distances to another teacher get a verdict",
        old="left_out = TO_REFERENCE if reference else ()",
        new="left_out = ()",
        killed_by="unit/test_measures_of_clips.py::test_distances_to_another_reference_get_no_verdict",
    ),
    Fault(
        name="participants_in_another_order",
        harm="the same command with its words in another order samples anew, and loses clips",
        old='networks={name: networks[name] for name in earlier["participants"]}',
        new="networks=networks",
        killed_by="unit/test_evaluate_command.py::test_a_killed_evaluation_continues_to_the_same_numbers",
    ),
)
