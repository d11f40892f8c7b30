"""Parts of ``benchmarks.gpu``, each with its function, time limit and description."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SECONDS = 480
"""Maximum time limit of a part."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the benchmark, measured in a separate process."""

    name: str
    """Name, as for ``--again``."""
    target: str
    """Importable ``module:function`` that takes a :class:`benchmarks.gpu.child.Context`."""
    seconds: float
    """Time limit. The part and all processes that it started are ended then."""
    shows: str
    """Line above the part's table."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MOST_SECONDS:
            raise ValueError(f"part {self.name!r} has {self.seconds} s; give at most {MOST_SECONDS}")


PARTS = (
    Part(
        name="kernels",
        target="benchmarks.gpu.kernels:kernels",
        seconds=120,
        shows="Every local kernel against attention written out in float64: forward, backward, in two chunks,"
        " log-sum-exp and its tangent. Errors are relative by norm (those of log-sum-exps absolute, over ten), the"
        " largest of all cases.",
    ),
    Part(
        name="quickstart",
        target="benchmarks.gpu.quickstart:quickstart",
        seconds=300,
        shows="The shipped teacher. The difference is the largest of losses to those of the CPU in the same steps,"
        " relative; wanted is 1e-4 in fp32.",
    ),
    Part(
        name="attention",
        target="benchmarks.gpu.attention:attention",
        seconds=240,
        shows="bf16, heads of 128. Arithmetic is 4 S^2 H D for the forward, 2.5 times that for the backward, 3 times"
        " for the derivative with its forward; the share is of the fastest matrix product of this run. Errors are"
        " against float64, relative by norm.",
    ),
    Part(
        name="joint attention",
        target="benchmarks.gpu.attention:joint",
        seconds=120,
        shows="HunyuanVideo 1.5's attention at 480p on one rank, bf16: text and video attend to each other, and 956 of"
        " 1,256 text tokens are masked. Arithmetic counts masked keys too.",
    ),
    Part(
        name="wan 1.3B",
        target="benchmarks.gpu.wan:small",
        seconds=300,
        shows="Three Wan 1.3B of random weights and a rollout of one step: the trainer's own steps, medians after a"
        " round to warm up. MFU counts no recomputation; attention is its share of the time that kernels ran.",
    ),
    Part(
        name="wan 1.3B recomputation",
        target="benchmarks.gpu.wan:recomputed",
        seconds=240,
        shows="The same steps of DMD2 with another `activation_checkpointing` of student and fake score; the part above"
        " has `full`.",
    ),
    Part(
        name="wan 1.3B compiled",
        target="benchmarks.gpu.wan:compiled",
        seconds=300,
        shows="The same steps of DMD2 with compiled blocks. The first round compiles.",
    ),
    Part(
        name="te",
        target="benchmarks.gpu.te:te",
        seconds=480,
        shows="Transformer Engine: its fp8 layer (the output, and the gradients of input, weight and bias) and its"
        " attention against float64, relative by norm; steps of DMD2 as above, next to bf16 and torchao.",
    ),
    Part(
        name="derivatives",
        target="benchmarks.gpu.derivatives:derivatives",
        seconds=300,
        shows="One forward of a whole network with random weights, bf16, without and with its forward-mode derivative:"
        " Wan 1.3B and HunyuanVideo 1.5 at 480p, LTX 2B at 704p.",
    ),
    Part(
        name="memory",
        target="benchmarks.gpu.memory:memory",
        seconds=300,
        shows="Memory of communicators and the allocator, a checkpoint's copy to the host, and the peak of each phase"
        " next to the one that `plan=true` predicts.",
    ),
    Part(
        name="wan 14B block",
        target="benchmarks.gpu.block:block",
        seconds=300,
        shows="One block of Wan 14B, forward and backward in bf16, as a rank of cp=8 at 720p has it: 9,450 tokens. Of"
        " a ring its attention is over these and 40 heads, once; of Ulysses over all 75,600 tokens and 5 heads, with"
        " the exchange done by copies on the spot. Kept is what the graph holds from forward to backward,"
        " beyond the block's input.",
    ),
    Part(
        name="encoders",
        target="benchmarks.gpu.encoders:encoders",
        seconds=300,
        shows="Wan's VAE and umT5-XXL with random weights, one clip or caption at a time. Errors are against fp32,"
        " relative by norm; of random weights they say more of the arithmetic than of pictures.",
    ),
    Part(
        name="wan 14B lora",
        target="benchmarks.gpu.wan:large",
        seconds=480,
        shows="Teacher, student and fake score on one frozen Wan 14B of random weights, adapters of rank 64: DMD2"
        " steps.",
    ),
)
