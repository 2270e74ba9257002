"""The paper's benchmark setups (Section 5.2, Appendix E.3): configurations and the implementations to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tfla.bench import entries
from tfla.bench.entries import ATTENTION, EMBEDDING, MAMBA, MAMBA_HEADS, TINY, TOKENS, Entry
from tfla.measure.problem import BOTH, FORWARD, STEP, Problem
from tfla.measure.timing import FEWEST
from tfla.ops.warmup import FORMS

MEMORY = "memory"
PANELS = (FORWARD, BOTH)


@dataclass(frozen=True)
class Suite:
    """The configurations of one setup along one axis, and the implementations to time."""

    title: str
    axis: str
    """The name of the quantity that varies, such as T or chunk size."""
    xs: tuple[int, ...]
    """The values on the axis."""
    at: Callable[[int], Problem]
    """Returns the problem at a value."""
    entries: tuple[Entry, ...]
    directions: tuple[str, ...] = (FORWARD, BOTH)
    """The directions to time: FORWARD, BOTH or STEP."""
    sustained_at: tuple[int, ...] | None = None
    """The configurations that also get a sustained run; None: all."""
    panels: tuple[str, ...] = (*PANELS, MEMORY)
    """The panels of its figure."""
    host: bool = False
    """Whether times are those in which the host enqueues a call, which no roofline of the device bounds."""
    alone: bool = False
    """Whether nothing is compiled in parallel, because each implementation fills the device, or the host is timed."""
    note: str = ""
    """A remark for its section of the page on how it is measured."""
    samples_together: int = FEWEST
    """The largest number of samples of an implementation that several processes run together."""
    in_a_row: int = 1
    """The number of calls that a sample times back to back; with several, the host enqueues ahead of the device."""

    def problem(self, entry: Entry, x: int, device: str) -> Problem:
        """Return the problem of an entry at x."""
        problem = replace(self.at(x), device=device)
        if entry.heads is not None:
            H, dqk, dhv = entry.heads
            problem = replace(problem, H=H, dqk=dqk, dhv=dhv)
        return replace(problem, B=entry.batch_factor * problem.B, dqk=round(entry.dqk_factor * problem.dqk))


TRAINING = (
    "A step is that of `tfla train`: forward, loss, backward, clipping and AdamW, weights in float32, random tokens "
    "without documents' borders. Llama has the same width, blocks and parameters. torch.compile gets a block, once "
    "for all of them, and the logits. The operator's part is what it takes alone at these shapes, forward and backward "
    "back to back, times the blocks. Memory is beyond weights and AdamW's moments, 16 GiB. The mLSTM keeps "
    "the input of the output gate for the backward, which Llama does not have, and takes 5 % more memory than Llama."
)
TOGETHER = (
    "A step is that of `tfla train`: forward, loss, backward, clipping and AdamW, weights in float32 under autocast, "
    "random tokens. Times are those of the slowest process. "
)


ON_PARTS = (
    "Two GPUs have half the steps each. With context parallelism they exchange one state for each head. With an "
    "all-to-all over heads each gets half the heads of q, k, v and the gates for all steps, and gives h back. The "
    "kernels are the same. Samples of the two GPUs start together, and a time is that of the slower one. Rooflines are "
    "those of two GPUs."
)


def _lengths(H: int, dqk: int, dhv: int) -> Callable[[int], Problem]:
    """Return a function from T to the problem with a constant number of tokens, whose batch shrinks as T grows."""
    return lambda T: Problem(max(1, TOKENS // T), T, H, dqk, dhv)


LENGTHS = tuple(2**n for n in range(9, 17))
RECURRENT_MODELS = (
    "Weights are random. mamba2 has 16 layers of width 2,048 with 64 heads of 64, state 128 and 8 groups; qwen3_next "
    "has 8 layers of width 2,048, of which 2 are attention, with 32 experts of which 4 are used. tfla is "
    "tfla.integrations.transformers.accelerate(model)."
)


MIXER_LAYERS = (
    "A layer is all of a mixer: projections, short convolution, recurrence or attention, gates, norm and output "
    "projection, with weights in bfloat16. The backward computes the gradients of the input and of the weights. Sizes "
    "are the defaults of ModelConfig, with heads whose keys have 128 channels; Gated DeltaNet has those of Qwen3-Next."
)


SUITES = {
    "fig4": Suite(
        f"Figure 4: runtime by sequence length, {TOKENS:,} tokens, 16 heads, dqk 128, dhv 256", "T", LENGTHS,
        _lengths(16, 128, 256),
        (
            *entries.own(), *entries.nxai("limit 64", "exp 128", "sig 128", "sig 256"),
            *entries.fla("simple_gla chunk", "simple_gla fused_chunk", "gla chunk"), *MAMBA,
            *entries.with_heads(ATTENTION, (32, 128, 128)),
        ),
        sustained_at=(8192,), panels=PANELS,
    ),
    "fig5": Suite(
        "Figure 5: runtime and memory by chunk size, T 8,192, batch 8, 8 heads, dqk 256, dhv 512", "chunk size",
        tuple(2**n for n in range(6, 13)), lambda L: Problem(8, 8192, 8, 256, 512, chunk_size=L),
        (*entries.own(), *entries.nxai("sig", "exp")), panels=(BOTH, MEMORY),
    ),
    "fig12": Suite(
        f"Figure 12: runtime and memory beside GLA, {TOKENS:,} tokens, 8 heads, dqk 256, dhv 512", "T", LENGTHS,
        _lengths(8, 256, 512),
        (
            *entries.own(), *entries.nxai("limit 64", "exp 128", "sig 128", "sig 256"),
            *entries.fla("simple_gla chunk", "simple_gla fused_chunk", "gla chunk", "gla fused_chunk"),
        ),
        sustained_at=(8192,),
    ),
    "fig13": Suite(
        f"Figure 13: runtime and memory beside Lightning Attention, {TOKENS:,} tokens, 32 × 128 and 64 × 64", "T",
        LENGTHS, _lengths(32, 128, 128),
        tuple(
            entry
            for H, d in ((32, 128), (64, 64))
            for entry in entries.with_heads(
                (
                    *entries.own(papers=False), *entries.nxai("sig 128", "sig 256"),
                    *entries.fla("lightning", "simple_gla_constant"),
                ),
                (H, d, d), f"{H} × {d}",
            )
        ),
        sustained_at=(8192,),
    ),
    "fig14": Suite(
        "Figure 14: runtime by head dimension, T 8,192, batch 4, dqk = dhv, 4096 in all", "head dim",
        tuple(2**n for n in range(5, 11)), lambda d: Problem(4, 8192, EMBEDDING // d, d, d),
        (
            *entries.own(papers=False), *entries.nxai("limit 64", "exp 128", "sig 128"),
            *(replace(e, each=True) for e in entries.fla("simple_gla chunk", "simple_gla fused_chunk", "gla chunk")),
        ),
        sustained_at=(128,), panels=PANELS,
    ),
    "dims": Suite(
        f"Runtime and memory by head dims, T 8,192, {TOKENS:,} tokens, 4096 wide", "dhv", (64, 128, 256, 512),
        lambda d: Problem(8, 8192, EMBEDDING // d, d, d),
        tuple(
            replace(entry, dqk_factor=factor, group=group)
            for factor, group in ((1.0, "dqk = dhv"), (0.5, "dqk = dhv / 2"))
            for entry in entries.own()[:2]
        ),
        panels=PANELS,
    ),
    "packed": Suite(
        f"Packed sequences of mixed lengths beside batches of equal ones, {TOKENS:,} tokens, 16 heads, 128 × 256",
        "mean length", (512, 2048, 8192), _lengths(16, 128, 256),
        (
            *entries.own()[:2], *entries.packed(entries.own(papers=False)), *entries.fla("simple_gla chunk"),
            *entries.packed(entries.fla("simple_gla chunk")),
        ),
        sustained_at=(2048,), panels=PANELS,
        note="Lengths of packed sequences are exponentially distributed, the same for all implementations.",
    ),
    "decode": Suite(
        "Decoding: one step by batch size, 8 heads, dqk 256, dhv 512", "batch", tuple(2**n for n in range(11)),
        lambda B: Problem(B, 1, 8, 256, 512),
        (
            Entry("tfla mLSTMsig", "tfla.bench.implementations:step", {"gate": "sigmoid"}, form="step sigmoid"),
            Entry("tfla mLSTMexp", "tfla.bench.implementations:step", {"gate": "exp"}, form="step exp"),
            Entry("device copy of C", "tfla.bench.implementations:copy_state", form="step sigmoid"),
            Entry(
                "fla simple_gla fused_recurrent", "tfla.bench.baselines:simple_gla_step", needs="fla",
                form="step sigmoid",
            ),
            Entry(
                "mlstm_kernels mLSTMexp triton", "tfla.bench.baselines:mlstm_kernels_step", {"kernel": "triton"},
                needs="mlstm_kernels", form="step exp",
            ),
            Entry(
                "mlstm_kernels mLSTMexp native", "tfla.bench.baselines:mlstm_kernels_step", {"kernel": "native"},
                needs="mlstm_kernels", form="step exp",
            ),
            Entry(
                "tfla mLSTMexp, in place", "tfla.bench.implementations:step", {"gate": "exp", "in_place": True},
                form="step exp",
            ),
            Entry(
                "tfla mLSTMexp, state in bfloat16", "tfla.bench.implementations:step",
                {"gate": "exp", "state_dtype": "bfloat16"},
            ),
            Entry("device copy of C in bfloat16", "tfla.bench.implementations:copy_state", {"dtype": "bfloat16"}),
        ),
        directions=(FORWARD,), panels=(FORWARD,),
    ),
    "delta": Suite(
        f"Delta rules and gates by channel: runtime and memory by sequence length, {TOKENS:,} tokens", "T",
        (2048, 8192, TOKENS), _lengths(32, 128, 128), tuple(entries.delta()), sustained_at=(8192,),
        note="Keys and queries have norm 1. Gates for each channel are in bfloat16, one gate for each step and"
        " write strengths in float32; the backward computes all gradients. The roofline is that of the "
        "recurrence, forward and backward by themselves. Packed sequences have exponentially distributed "
        "lengths of mean 2,048. Activated calls normalize keys and queries and apply softplus to gates "
        "and a sigmoid to write strengths.",
    ),
    "delta_decode": Suite(
        "Delta rules and gates by channel: one step of decoding by batch size", "batch", (1, 16, 64, 256),
        lambda B: Problem(B, 1, 32, 128, 128), tuple(entries.delta_steps()), directions=(FORWARD,), panels=(FORWARD,),
        sustained_at=(64,),
    ),
    "mamba": Suite(
        f"Mamba-2: runtime and memory by sequence length, {TOKENS:,} tokens, 64 heads of 64, state 128, 8 groups", "T",
        (2048, 8192, TOKENS), _lengths(*MAMBA_HEADS),
        (Entry("tfla mamba_chunk_scan_combined", "tfla.bench.implementations:mamba2", {"groups": 8}), MAMBA[0]),
    ),
    "transformers": Suite(
        "Hugging Face transformers: prefill (forward) and training step (forward + backward) of an xLSTM, 1.1 billion "
        "parameters, 16,384 tokens", "T",
        (2048, 16_384), lambda T: Problem(max(1, 16_384 // T), T, 8, 128, 256),
        (
            Entry("tfla mLSTMexp", "tfla.bench.xlstm_models:model", {"cell": "tfla"}, needs="transformers"),
            Entry(
                "mlstm_kernels mLSTMexp xl_chunk 128", "tfla.bench.xlstm_models:model",
                {"cell": "mlstm_kernels", "kernel": "chunkwise--triton_xl_chunk", "chunk_size": 128},
                needs="mlstm_kernels",
            ),
            Entry(
                "transformers, its own path", "tfla.bench.xlstm_models:model", {"cell": "transformers"},
                needs="transformers",
            ),
        ),
        panels=(),
    ),
    "transformers_models": Suite(
        "Hugging Face transformers: prefill (forward) and training step (forward + backward) of Mamba-2 and Qwen3-Next "
        "of medium size, 8,192 tokens", "T",
        (2048, 8192), lambda T: Problem(max(1, 8192 // T), T, 1, 1, 1), tuple(entries.recurrent_models("model")),
        panels=(), note=RECURRENT_MODELS,
    ),
    "transformers_steps": Suite(
        "Hugging Face transformers: decoding of one token of each sequence by Mamba-2 and Qwen3-Next of medium size, "
        "after prompts of 1,024 tokens", "batch",
        (1, 16), lambda B: Problem(B, 1024, 1, 1, 1), tuple(entries.recurrent_models("step")), directions=(FORWARD,),
        panels=(), note=RECURRENT_MODELS,
    ),
    "mixers": Suite(
        f"Mixers of tfla.nn: one layer of width 2,048, {TOKENS // 2:,} tokens", "T", (2048, 8192, 32_768),
        lambda T: Problem(max(1, TOKENS // 2 // T), T, 1, 1, 1), tuple(entries.mixers("layer")), panels=(),
        sustained_at=(), note=MIXER_LAYERS,
    ),
    "mixers_decode": Suite(
        "Mixers of tfla.nn: one token of each sequence, one layer of width 2,048", "batch", (1, 16, 64),
        lambda B: Problem(B, 4096, 1, 1, 1), tuple(entries.mixers("step")), directions=(FORWARD,), panels=(),
        sustained_at=(),
        note=MIXER_LAYERS + " A step is replayed from a CUDA graph. Attention has 4,096 tokens in its cache.",
    ),
    "train": Suite(
        "Training step: 1.4 billion parameters, T 8,192, 8 heads of dqk 128, dhv 256, bfloat16 autocast", "batch",
        (1, 2, 3, 4, 5, 6, 8), lambda B: Problem(B, 8192, 8, 128, 256),
        tuple(entries.models(None) + entries.models("inductor")),
        directions=(STEP,), panels=(), alone=True, sustained_at=(), note=TRAINING,
    ),
    "train_parallel": Suite(
        "Training step on two GPUs: 1.4 billion parameters, T 8,192, 8 heads of dqk 128, dhv 256, bfloat16 autocast",
        "sequences per GPU", (1, 2, 3, 4), lambda B: Problem(B, 8192, 8, 128, 256), tuple(entries.trained_together(2)),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
        note=TOGETHER + "FSDP is FSDP2's fully_shard of each block and of the rest of the model.",
    ),
    "train_fsdp": Suite(
        "Training step on two GPUs by variants of FSDP2: 1.4 billion parameters, T 8,192, 8 heads of dqk 128, dhv 256, "
        "bfloat16 autocast", "sequences per GPU and pass", (2, 3), lambda B: Problem(B, 8192, 8, 128, 256),
        tuple(entries.fsdp_variants(2)), directions=(STEP,), panels=(), alone=True, sustained_at=(), in_a_row=4,
        note=TOGETHER + "A sample is the mean of four steps back to back, as `tfla train` does them. Weights are "
        "gathered and gradients reduced in float32 where nothing else is said. Each row has the "
        "profile of one further step, 'streams': the seconds in which the GPU computes, sends, sends without "
        "computing, and does neither, and those of each stream.",
    ),
    "train_long": Suite(
        "Training step by length on two GPUs: one sequence, 1.4 billion parameters, 8 heads of dqk 128, dhv 256, "
        "bfloat16 autocast", "T", tuple(2**n for n in range(15, 20)), lambda T: Problem(1, T, 8, 128, 256),
        tuple(entries.trained_on_parts(2, activation_checkpointing=True)),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
        note=TOGETHER + "With activation checkpointing: the backward computes blocks and logits again. Two GPUs share "
        "the steps of the sequence, and parameters by FSDP2.",
    ),
    "context_parallel": Suite(
        "Context parallelism: one sequence on two GPUs, 16 heads, dqk 128, dhv 256", "T", (2**16, 2**18, 2**20),
        lambda T: Problem(1, T, 16, 128, 256), tuple(entries.on_parts(2)), panels=(), alone=True, sustained_at=(),
        note=ON_PARTS, samples_together=20,
    ),
    "steps": Suite(
        "Decoding: a handful of steps at once, batch 16, 8 heads, dqk 256, dhv 512", "steps", (1, 2, 4, 8, 16, 32),
        lambda T: Problem(16, T, 8, 256, 512),
        (
            Entry("tfla mLSTMsig", "tfla.bench.implementations:step", {"gate": "sigmoid"}, form="step sigmoid"),
            Entry("tfla mLSTMexp", "tfla.bench.implementations:step", {"gate": "exp"}, form="step exp"),
        ),
        directions=(FORWARD,), panels=(FORWARD,),
    ),
    "generate": Suite(
        "Generation: one token by batch size, 7B parameters (32 blocks, 8 heads, dqk 256, dhv 512) in bfloat16",
        "batch", (1, 2, 4, 8, 16, 32, 64), lambda B: Problem(B, 1, 8, 256, 512),
        tuple(
            Entry(
                f"tfla mLSTM{gate}{name}", "tfla.bench.generation:decode",
                {"mixer": f"mlstm_{gate}", "own_step": own_step},
            )
            for name, own_step in (("", False), (", the model's own step", True))
            for gate in ("sig", "exp")
        ),
        directions=(FORWARD,), panels=(FORWARD,),
    ),
    "speculate": Suite(
        "Speculative decoding: 256 greedy tokens by batch size, 1.4 billion parameters in bfloat16", "batch", (1, 8),
        lambda B: Problem(B, 256, 8, 128, 256),
        tuple(Entry(f"tfla mLSTMexp, draft: {draft}", "tfla.bench.speculation:text", {"draft": draft})
              for draft in ("none", "n-gram of 3", "another model", "the model itself")),
        directions=(FORWARD,), panels=(), alone=True, sustained_at=(),
        note="Times are those of a whole call of `tfla.nn.generate`, with a prompt of 64 tokens and the capture of "
        "CUDA graphs; tokens per second are those after the first token. Weights are random: the model itself is a "
        "draft that is always right, another model one that hardly ever is.",
    ),
    "first_calls": Suite(
        "First calls of operators, and the calls after them: 8 sequences, 16 heads, dqk 128, dhv 256", "T", (4096,),
        lambda T: Problem(8, T, 16, 128, 256),
        tuple(Entry(f"tfla {form}", "tfla.bench.first_calls:operator", {"form": form}) for form in FORMS),
        panels=(), alone=True, sustained_at=(),
        note="First calls are those of `tfla.warmup` in a process of its own with an empty cache of Triton.",
    ),
    "host": Suite(
        "Host: time to enqueue a call on a GPU with little to do, batch 1, 1 head, dqk 128, dhv 256", "T", (128, 1024),
        lambda T: Problem(1, T, 1, 128, 256),
        (
            *entries.own(), *entries.nxai("limit 64", "exp 128", "sig 128"),
            *entries.fla("simple_gla chunk", "simple_gla fused_chunk"),
            *entries.with_heads(ATTENTION, (2, 128, 128)),
        ),
        panels=(), host=True, alone=True,
        note="A rested call finds the host's caches cold; a sustained one comes right after others, and takes as long "
        "as the GPU where that is slower.",
    ),
    "smoke": Suite(
        "Smoke: seconds on any device, to see that everything runs", "T", (64, 128),
        lambda T: Problem(2, T, 2, 16, 32, dtype="float32"),
        (
            *entries.own()[:2],
            Entry("attention, torch", "tfla.bench.baselines:sdpa", {"backend": "MATH"}, heads=(4, 16, 16)),
        ),
    ),
    "smoke_delta": Suite(
        "Smoke: delta rules and gates by channel, seconds on any device", "T", (64, 128),
        lambda T: Problem(2, T, 2, 16, 32, dtype="float32"),
        tuple(
            Entry("tfla", "tfla.bench.delta:chunk", {"model": model}, form=model, group=name)
            for name, model, _ in (entries.DELTA_MODELS[0], *entries.DELTA_MODELS[3:])
        ),
    ),
    "smoke_mixers": Suite(
        "Smoke: mixers of tfla.nn, seconds on any device", "T", (64, 128),
        lambda T: Problem(2, T, 1, 1, 1, dtype="float32"),
        tuple(entries.mixers("layer", d_model=32, num_heads=2, mamba_head_dim=16, mamba_state_dim=16)), panels=(),
        sustained_at=(), note=MIXER_LAYERS,
    ),
    "smoke_context": Suite(
        "Smoke: one sequence on two processes, seconds on any device", "T", (64, 128),
        lambda T: Problem(1, T, 2, 8, 16, dtype="float32"), tuple(entries.on_parts(2)), panels=(), alone=True,
        sustained_at=(),
    ),
    "smoke_fsdp": Suite(
        "Smoke: variants of FSDP2 on two processes, seconds on any device", "T", (64,),
        lambda T: Problem(2, T, 2, 8, 16, dtype="float32"),
        tuple(e for e in entries.fsdp_variants(2, **TINY) if "gathered" not in e.name),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
        note="bfloat16 weights need autocast, which a CPU's float32 steps do not have.",
    ),
    "smoke_parallel": Suite(
        "Smoke: training on several processes, seconds on any device", "T", (64, 128),
        lambda T: Problem(2, T, 2, 8, 16, dtype="float32"),
        (
            *entries.trained_together(2, **TINY), entries.trained_on_parts(2, **TINY)[1],
            replace(entries.trained_on_parts(2, **TINY, activation_checkpointing=True)[1], group="with checkpointing"),
        ),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
    ),
}  # fmt: skip
