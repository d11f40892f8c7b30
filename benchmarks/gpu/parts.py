"""Parts of ``benchmarks.gpu``, in the order of what they decide; each with its function, time limit and description."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SECONDS = 120
"""Maximum time limit of a part: a short loan of a GPU then finishes most of them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the benchmark, measured in a separate process."""

    name: str
    """Name, as for ``--again``."""
    target: str
    """Importable ``module:function`` that takes a :class:`benchmarks.gpu.child.Context` and ``words``."""
    words: tuple[str, ...] = ()
    seconds: float = MOST_SECONDS
    """Time limit. The part and all processes that it started are ended then."""
    shows: str
    """Line above the part's table."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MOST_SECONDS:
            raise ValueError(f"part {self.name!r} has {self.seconds} s; give at most {MOST_SECONDS}")


STEPS = (
    "Three Wan 1.3B of random weights, a rollout of one step, 32,760 tokens, selective recomputation: the trainer's own"
    " steps, medians after a round that compiles and warms up. MFU counts no recomputation; attention is its share of"
    " the time that kernels ran."
)
AS_ABOVE = "The same steps as in `wan 1.3B compiled`"
DERIVATIVES = (
    "One forward of a whole network with random weights, bf16, without and with its forward-mode derivative: Wan 1.3B"
    " and HunyuanVideo 1.5 at 480p, LTX 2B at 704p, each a part."
)


def _steps(name: str, run: str, shows: str) -> Part:
    return Part(name=name, target="benchmarks.gpu.wan:run", words=(run,), shows=shows)


PARTS = (
    Part(
        name="attention",
        target="benchmarks.gpu.attention:attention",
        shows="bf16, heads of 128. Arithmetic is 4 S^2 H D for the forward, 2.5 times that for the backward, 3 times"
        " for the derivative with its forward; the share is of the fastest matrix product of this run. Errors are"
        " against float64, relative by norm. Setup compiles and checks FlashAttention 4; a first call of another"
        " length compiles nothing again. The rule of `auto` (fsdp_cp/attention/kernels/cuda.py) rests on this table.",
    ),
    Part(
        name="sparse attention",
        target="benchmarks.gpu.sparse:sparse",
        shows="Triton kernels of sparse attention: chosen if they pass their check at logits of 300, which compiles"
        " them; scores wanted equal bit by bit. Times of bf16, heads of 128, tiles of 64 tokens, with means, scores and"
        " choice, next to dense attention.",
    ),
    _steps("wan 1.3B compiled", "DMD2, compiled", STEPS),
    _steps("wan 1.3B compiled, cuDNN", "DMD2, compiled, cuDNN", f"{AS_ABOVE}, with cuDNN's attention."),
    Part(
        name="streaming",
        target="benchmarks.gpu.streaming:streaming",
        words=("eager",),
        shows="A causal Wan 1.3B at 480p samples 81 frames in chunks of 3 latent frames, each in four steps and a pass"
        " for the cache: batch 1, without the VAE, three clips in a row.",
    ),
    Part(
        name="streaming, compiled",
        target="benchmarks.gpu.streaming:streaming",
        words=("compiled",),
        shows="The same with compiled blocks. The first clip compiles.",
    ),
    Part(
        name="kernels",
        target="benchmarks.gpu.kernels:kernels",
        shows="Every local kernel against attention written out in float64: forward, backward, in two chunks,"
        " log-sum-exp and its tangent. Errors are relative by norm (those of log-sum-exps absolute, over ten), the"
        " largest of all cases.",
    ),
    Part(
        name="quickstart",
        target="benchmarks.gpu.quickstart:like_the_cpu",
        shows="The shipped teacher. The difference is the largest of losses to those of the CPU in the same steps,"
        " relative; wanted is 1e-4 in fp32.",
    ),
    _steps("wan 1.3B", "DMD2", f"{AS_ABOVE}, not compiled, with the peak that `plan=true` predicts."),
    Part(
        name="memory",
        target="benchmarks.gpu.memory:memory",
        shows="Memory of communicators and the allocator, a checkpoint's copy to the host, and the peak of each phase"
        " next to the one that `plan=true` predicts.",
    ),
    _steps("wan 1.3B, fp8", "DMD2, compiled, fp8", f"{AS_ABOVE}, with linear layers in fp8 (torchao)."),
    Part(
        name="derivative of wan",
        target="benchmarks.gpu.derivatives:derivative",
        words=("wan2_1_t2v_1_3b",),
        shows=DERIVATIVES,
    ),
    _steps("wan 1.3B, rCM", "rCM", "Steps of rCM, not compiled, with the peak that `plan=true` predicts."),
    _steps(
        "wan 14B lora",
        "14B, adapters",
        "Teacher, student and fake score on one frozen Wan 14B of random weights, adapters of rank 64: DMD2 steps of 17"
        " frames.",
    ),
    Part(
        name="encoders",
        target="benchmarks.gpu.encoders:encoders",
        shows="Wan's VAE and umT5-XXL with random weights, one clip or caption at a time. Errors are against fp32,"
        " relative by norm; of random weights they say more of the arithmetic than of pictures.",
    ),
    Part(
        name="quickstart, all methods",
        target="benchmarks.gpu.quickstart:all_methods",
        shows="The shipped teacher: every method, and every way to save memory.",
    ),
    Part(
        name="joint attention",
        target="benchmarks.gpu.attention:joint",
        shows="HunyuanVideo 1.5's attention at 480p on one rank, bf16: text and video attend to each other, and 956 of"
        " 1,256 text tokens are masked. Arithmetic counts masked keys too.",
    ),
    Part(
        name="derivative of hunyuan",
        target="benchmarks.gpu.derivatives:derivative",
        words=("hunyuan_video1_5",),
        shows=DERIVATIVES,
    ),
    Part(
        name="derivative of ltx",
        target="benchmarks.gpu.derivatives:derivative",
        words=("ltx_video_2b",),
        shows=DERIVATIVES,
    ),
    _steps("wan 1.3B, no recomputation", "DMD2, none", f"{AS_ABOVE}, not compiled and without recomputation."),
    Part(
        name="te",
        target="benchmarks.gpu.te:te",
        shows="Transformer Engine: its fp8 layer (the output, and the gradients of input, weight and bias) against"
        " float64, relative by norm; compiled steps of DMD2.",
    ),
)
