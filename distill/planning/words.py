"""A plan in words, as ``plan=true`` prints them."""

from __future__ import annotations

from distill.config import Config
from distill.planning.hardware import hardware_names
from distill.planning.prediction import GIB, Prediction
from distill.planning.watched import KINDS


def in_words(config: Config, prediction: Prediction) -> list[str]:
    """The lines that ``plan=true`` prints."""
    lines = [
        f"plan of {config.run_dir} on {prediction.mesh.world} ranks: nothing is loaded, trained or sent",
        f"mesh: {prediction.mesh}; {prediction.tokens} tokens a sample",
        "GiB a rank, the most of each kind in any phase:",
        f"  {'':<8}" + "".join(f"{kind:>17}" for kind in KINDS),
    ]
    for role in prediction.roles:
        lines.append(f"  {role:<8}" + "".join(f"{size:>17.3f}" for size in prediction.role_gib(role).values()))
    lines.append("GiB a rank at the peak of each phase, and the largest parts of it:")
    for name, peak in sorted(prediction.peaks.items(), key=lambda item: -item[1].bytes):
        largest = sorted(peak.by.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{role} {kind} {size / GIB:.3f}" for (role, kind), size in largest)
        lines.append(f"  {peak.bytes / GIB:8.3f}  {name or 'between phases'}: {words}")
    lines.append(
        f"allocated in training {prediction.allocated_gib:.3f} GiB; with fragmentation, CUDA's context and NCCL, which"
        f" are assumed, {prediction.device_gib:.2f} GiB in {prediction.peak_phase or 'between phases'}"
    )
    if prediction.host_gib:
        lines.append(
            f"of the host's memory {prediction.host_gib:.3f} GiB a rank: {prediction.offloaded_gib:.3f} for what is"
            f" offloaded, {prediction.staging_gib:.3f} for the copy of a checkpoint that is being written"
        )
    lines.append(verdict(config, prediction))
    if prediction.hardware is None:
        lines.append(f"known hardware: {', '.join(hardware_names())}")
    return lines


def verdict(config: Config, prediction: Prediction) -> str:
    """In a sentence or two: does it fit, how long does it take."""
    name, hardware = config.planning.hardware, prediction.hardware
    if hardware is None:
        return f"{prediction.device_gib:.1f} GiB of each device; planning.hardware=NAME says whether it fits"
    fits = "fits" if prediction.fits else "does not fit"
    words = f"It {fits}: {prediction.device_gib:.1f} GiB of the {hardware.memory_gib:g} GiB of each {name}"
    seconds, mfu = prediction.seconds_per_step, prediction.mfu
    if seconds is None or mfu is None:
        return f"{words}; no seconds: {prediction.why_no_seconds}."
    steps, world = config.steps, prediction.mesh.world
    return (
        f"{words}; by arithmetic {seconds:.3g} s a step (MFU {mfu:.2f}, products at {hardware.sustained:g} of"
        f" {hardware.bf16_tflops:g} TFLOPS, which is assumed), {steps} steps in {seconds * steps / 86400:.3g} days and"
        f" {seconds * steps * world / 3600:,.0f} GPU-hours."
    )
