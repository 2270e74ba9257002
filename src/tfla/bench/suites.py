"""The paper's benchmark setups (Section 5.2, Appendix E.3): configurations and the implementations to time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tfla.backends import BACKENDS
from tfla.measure.problem import BOTH, FORWARD, STEP, Problem
from tfla.measure.roofline import DeltaModel
from tfla.measure.timing import FEWEST
from tfla.nn.config import Mixer
from tfla.ops.warmup import FORMS

TOKENS, EMBEDDING = 65_536, 4096
MEMORY = "memory"
PANELS = (FORWARD, BOTH)
Form = Literal["exp", "sigmoid", "step exp", "step sigmoid", "gdn", "kda", "gla"]
DELTA_FORMS: dict[str, DeltaModel] = {"gdn": "gdn", "kda": "kda", "gla": "gla"}
Heads = tuple[int, int, int]  # H, dqk, dhv
GATES: tuple[Form, ...] = ("sigmoid", "exp")


@dataclass(frozen=True)
class Entry:
    """An implementation to time."""

    name: str
    make: str
    """The module:function of (problem, **options) that returns its call, a :class:`tfla.measure.problem.Work`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The options of that function."""
    heads: Heads | None = None
    """Its heads, where they differ from those of the suite."""
    needs: str | None = None
    """The package that has to be installed."""
    form: Form | None = None
    """The form whose roofline it is compared with."""
    each: bool = False
    """Whether its kernels are compiled for each configuration separately."""
    group: str = ""
    """The table and the row of panels to which it belongs, where a suite has several."""
    dqk_factor: float = 1.0
    """The ratio of its dqk to that of the suite."""
    processes: int = 1
    """The processes that run it together, each on a GPU of its own."""
    batch_factor: int = 1
    """The ratio of its batch size, over all processes, to that of the suite."""
    xs: tuple[int, ...] | None = None
    """The values on the axis at which it is timed; None: all of the suite."""

    @property
    def key(self) -> str:
        """The name of the entry with its group."""
        return f"{self.name}, {self.group}" if self.group else self.name

    @property
    def ours(self) -> bool:
        """True for an implementation of this library."""
        return self.needs is None and self.name.startswith("tfla")


@dataclass(frozen=True)
class Suite:
    """The configurations of one setup along one axis, and the implementations to time."""

    title: str
    axis: str
    """The name of what varies, such as T or chunk size."""
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
    """Whether times are those of the host to enqueue, which the rooflines of the device do not bound."""
    alone: bool = False
    """Whether nothing is compiled in parallel, because each implementation fills the device or the host is timed."""
    note: str = ""
    """A remark for its section on how it is measured."""
    samples_together: int = FEWEST
    """The largest number of samples of what several processes run together."""
    in_a_row: int = 1
    """The number of calls of a sample, back to back, where the host works ahead of the device in use."""

    def problem(self, entry: Entry, x: int, device: str) -> Problem:
        """Return the problem of an entry at x."""
        problem = replace(self.at(x), device=device)
        if entry.heads is not None:
            H, dqk, dhv = entry.heads
            problem = replace(problem, H=H, dqk=dqk, dhv=dhv)
        return replace(problem, B=entry.batch_factor * problem.B, dqk=round(entry.dqk_factor * problem.dqk))


def _own(papers: bool = True) -> list[Entry]:
    """Return mLSTMsig and mLSTMexp by the library's choice, and by every kernel for GPUs.

    The paper's kernels are among them only with `papers`.
    """
    kernels = [(b.name, k) for b in BACKENDS.values() if b.name not in ("chunkwise", "reference") for k in b.kernels]
    kernels = [(backend, kernel) for backend, kernel in kernels if papers or kernel != "tfla"]
    implementations: list[tuple[str | None, str | None]] = [(None, None), *kernels]
    return [
        Entry(
            f"tfla mLSTM{gate[:3]}" + (f", {backend} {kernel}" if backend else ""),
            "tfla.measure.operator:mlstm", {"gate": gate, "backend": backend, "kernel": kernel}, form=gate,
        )
        for backend, kernel in implementations
        for gate in ("sigmoid", "exp")
    ]  # fmt: skip


NXAI: dict[str, tuple[str, dict[str, Any], Form]] = {  # abbreviation -> name, options, form
    "limit": ("mLSTMexp limit_chunk", {"kernel": "triton_limit_chunk"}, "exp"),
    "exp": ("mLSTMexp xl_chunk", {"kernel": "triton_xl_chunk"}, "exp"),
    "sig": ("mLSTMsig xl_chunk", {"kernel": "triton_xl_chunk_siging", "normalize": False}, "sigmoid"),
}


def _nxai(*kernels: str) -> list[Entry]:
    """Return implementations of mlstm_kernels; "sig 128" is mLSTMsig by xl_chunk with chunk size 128."""
    made = []
    for kernel in kernels:
        abbreviation, _, size = kernel.partition(" ")
        name, options, form = NXAI[abbreviation]
        made.append(
            Entry(
                f"mlstm_kernels {name} {size}".rstrip(), "tfla.bench.baselines:mlstm_kernels",
                options | ({"chunk_size": int(size)} if size else {}), needs="mlstm_kernels", form=form, each=True,
            )
        )  # fmt: skip
    return made


def _fla(*kernels: str) -> list[Entry]:
    """Return implementations of flash-linear-attention; "simple_gla chunk" is chunk_simple_gla."""
    made = []
    for kernel in kernels:
        form, _, which = kernel.partition(" ")
        options = {"kernel": which} if which else {}
        bounded_as: Form | None = "sigmoid" if form != "gla" else None
        made.append(Entry(f"fla {kernel}", f"tfla.bench.baselines:{form}", options, needs="fla", form=bounded_as))
    return made


MAMBA_HEADS = (64, 128, 64)
MAMBA = [
    Entry("Mamba-2", "tfla.bench.baselines:mamba2", {"groups": 8}, heads=MAMBA_HEADS, needs="mamba_ssm"),
    Entry("Mamba", "tfla.bench.baselines:mamba", heads=(EMBEDDING, 16, 1), needs="selective_scan_cuda"),
]
ATTENTION = [
    Entry("attention, FlashAttention-2 (torch)", "tfla.bench.baselines:sdpa", {"backend": "FLASH_ATTENTION"}),
    Entry("attention, cuDNN", "tfla.bench.baselines:sdpa", {"backend": "CUDNN_ATTENTION"}),
    Entry(
        "attention, FlashAttention-3", "tfla.bench.baselines:flash_attention", {"module": "flash_attn_interface"},
        needs="flash_attn_interface",
    ),
    Entry(
        "attention, FlashAttention-4", "tfla.bench.baselines:flash_attention", {"module": "flash_attn.cute"},
        needs="flash_attn.cute",
    ),
]  # fmt: skip


def _with(entries: Iterable[Entry], heads: Heads, group: str = "") -> list[Entry]:
    """Return entries with other heads and in another group."""
    return [replace(entry, heads=heads, group=group) for entry in entries]


def _packed(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries for the same tokens as packed sequences of mixed lengths."""
    made = []
    for entry in entries:
        name, comma, kernel = entry.name.partition(", ")
        made.append(replace(entry, name=f"{name}, packed{comma}{kernel}", options=entry.options | {"packed": True}))
    return made


DELTA_MODELS: tuple[tuple[str, DeltaModel, Heads], ...] = (
    ("Gated DeltaNet", "gdn", (16, 128, 128)),
    ("Gated DeltaNet", "gdn", (16, 128, 256)),
    ("Gated DeltaNet", "gdn", (32, 128, 128)),
    ("KDA", "kda", (32, 128, 128)),
    ("GLA", "gla", (8, 256, 512)),
)
DELTA_STEPS = (DELTA_MODELS[2], DELTA_MODELS[3], DELTA_MODELS[4])


def _delta_group(name: str, heads: Heads) -> str:
    """Return the name of a model with its heads."""
    return f"{name}, {' × '.join(map(str, heads))}"


def _delta() -> list[Entry]:
    """Return the delta rule and GLA beside flash-linear-attention's, of each model: all lengths, and packed."""
    made: list[Entry] = []
    for name, model, heads in DELTA_MODELS:
        options = {"model": model}
        entries = [
            Entry("tfla", "tfla.bench.delta:chunk", options, form=model),
            Entry("fla", "tfla.bench.delta:fla_chunk", options, needs="fla", form=model, xs=(8192, TOKENS)),
        ]
        packed = [replace(entry, xs=(2048,)) for entry in _packed(entries)]
        if model == "gdn":  # on Hopper the library chooses another backend than Triton's for it
            entries.insert(1, replace(entries[0], name="tfla, triton fused", options=options | {"backend": "triton"}))
        made += _with((*entries, *packed), heads, _delta_group(name, heads))
    return made


def _delta_steps() -> list[Entry]:
    """Return decoding steps of the delta rule and of GLA beside a copy of the state, of each model."""
    made: list[Entry] = []
    for name, model, heads in DELTA_STEPS:
        step, options = "tfla.bench.delta:step", {"model": model}
        entries = (
            Entry("tfla", step, options, form="step sigmoid"),
            Entry("tfla, in place", step, options | {"in_place": True}, form="step sigmoid"),
            Entry("device copy of C", "tfla.bench.implementations:copy_state", form="step sigmoid"),
            Entry("fla", "tfla.bench.delta:fla_step", options, needs="fla", form="step sigmoid"),
        )
        made += _with(entries, heads, _delta_group(name, heads))
    return made


LLAMA_HEADS = (16, 128, 128)
TRAINING = (
    "A step is that of `tfla train`: forward, loss, backward, clipping and AdamW, weights in float32, random tokens "
    "without documents' borders. Llama has the same width, blocks and parameters. torch.compile gets a block, once "
    "for all of them, and the logits. The operator's part is what it takes alone at these shapes, forward and backward "
    "back to back, times the blocks. Memory is beyond weights and AdamW's moments, 16 GiB."
)


def _models(compiler: str | None) -> list[Entry]:
    """Return training steps of language models: of the mLSTM, and of a Llama with the same width and blocks."""
    how = ", torch.compile" if compiler else ""
    options = {"compiler": compiler}
    make = "tfla.bench.training:step"
    entries = [Entry(f"tfla mLSTM{gate}{how}", make, options | {"mixer": f"mlstm_{gate}"}) for gate in ("sig", "exp")]
    llama = f"Llama, 16 heads of 128, cuDNN{how}"
    return [*entries, Entry(llama, make, options | {"mixer": "attention"}, heads=LLAMA_HEADS)]


TINY = {"blocks": 2, "vocab": 30}
TOGETHER = (
    "A step is that of `tfla train`: forward, loss, backward, clipping and AdamW, weights in float32 under autocast, "
    "random tokens. Times are those of the slowest process. "
)


def _trained_together(gpus: int, **options: Any) -> list[Entry]:
    """Return training steps on one GPU, and on several that share the parameters and have different sequences."""
    make, options = "tfla.bench.parallel_training:step", {"mixer": "mlstm_exp", **options}
    return [
        Entry("tfla mLSTMexp, 1 GPU", make, options),
        Entry(
            f"tfla mLSTMexp, {gpus} GPUs, FSDP", make, options | {"layout": {"dp_shard": gpus}}, processes=gpus,
            batch_factor=gpus,
        ),
    ]  # fmt: skip


FREED = {"reshard_after_forward": True}
WITHOUT_RESHARD = {"reshard_after_forward": False}
# Options of FSDP2 to compare, by the name of each variant; the first is what `tfla train` does.
VARIANTS: dict[str, dict[str, Any]] = {
    "by default": {},
    "FSDP": FREED,
    "weights kept": WITHOUT_RESHARD,
    "2 blocks a gather": FREED | {"blocks_per_gather": 2},
    "4 blocks a gather": FREED | {"blocks_per_gather": 4},
    "prefetch 1": FREED | {"prefetch": 1},
    "prefetch 2": FREED | {"prefetch": 2},
    "bfloat16 reduced": FREED | {"dtypes": {"reduce_dtype": "bfloat16"}},
    "bfloat16 gathered": FREED | {"dtypes": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    "weights kept, 2 blocks a gather, prefetch 2": WITHOUT_RESHARD | {"blocks_per_gather": 2, "prefetch": 2},
    "weights kept, bfloat16 reduced": WITHOUT_RESHARD | {"dtypes": {"reduce_dtype": "bfloat16"}},
    "bfloat16 gathered and reduced, weights kept, prefetch 2": WITHOUT_RESHARD
    | {"dtypes": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, "prefetch": 2},
    "2 passes": FREED | {"passes": 2},
    "2 passes, reduced once": FREED | {"passes": 2, "reduce_each_pass": False},
    "2 passes, reduced once, weights kept": WITHOUT_RESHARD | {"passes": 2, "reduce_each_pass": False},
}


def _fsdp_variants(gpus: int, **options: Any) -> list[Entry]:
    """Return training steps on one GPU, in one and in two passes, and on several with each variant of FSDP2."""
    make, options = "tfla.bench.parallel_training:step", {"mixer": "mlstm_exp", "profile": True, **options}
    several = {**options, "layout": {"dp_shard": gpus}}
    return [
        Entry("tfla mLSTMexp, 1 GPU", make, options),
        Entry("tfla mLSTMexp, 1 GPU, 2 passes", make, options | {"passes": 2}, batch_factor=2),
        *(
            Entry(
                f"tfla mLSTMexp, {gpus} GPUs, {name}", make, several | given, processes=gpus,
                batch_factor=gpus * given.get("passes", 1),
            )
            for name, given in VARIANTS.items()
        ),
    ]  # fmt: skip


def _trained_on_parts(gpus: int, **options: Any) -> list[Entry]:
    """Return training steps on one GPU, and on several that share the steps of each sequence and the parameters."""
    make, options = "tfla.bench.parallel_training:step", {"mixer": "mlstm_exp", **options}
    return [
        Entry("tfla mLSTMexp, 1 GPU", make, options),
        Entry(
            f"tfla mLSTMexp, {gpus} GPUs, context parallel", make, options | {"layout": {"cp": gpus}}, processes=gpus
        ),
    ]  # fmt: skip


def _on_parts(gpus: int) -> list[Entry]:
    """Return the operator on one GPU, and on several that share the steps of a sequence, in two ways."""
    made = []
    for gate in GATES:
        name, options = f"tfla mLSTM{gate[:3]}", {"gate": gate}
        make = "tfla.bench.parallel_operator:"
        made += [
            Entry(f"{name}, 1 GPU", "tfla.measure.operator:mlstm", options, form=gate),
            Entry(f"{name}, {gpus} GPUs", f"{make}context_parallel", options, form=gate, processes=gpus),
            Entry(
                f"{name}, {gpus} GPUs, all-to-all over heads", f"{make}all_to_all", options, form=gate, processes=gpus
            ),
        ]  # fmt: skip
    return made


ON_PARTS = (
    "Two GPUs have half the steps each. With context parallelism they exchange one state for each head. With an "
    "all-to-all over heads each gets half the heads of q, k, v and the gates for all steps, and gives h back. The "
    "kernels are the same. Samples of the two GPUs start together, and a time is that of the slower one. Rooflines are "
    "those of two GPUs."
)


def _lengths(H: int, dqk: int, dhv: int) -> Callable[[int], Problem]:
    """Return the problem by T with a constant number of tokens, so that the batch shrinks as T grows."""
    return lambda T: Problem(max(1, TOKENS // T), T, H, dqk, dhv)


LENGTHS = tuple(2**n for n in range(9, 17))
RECURRENT_MODELS = (
    "Weights are random. mamba2 has 16 layers of width 2,048 with 64 heads of 64, state 128 and 8 groups; qwen3_next "
    "has 8 layers of width 2,048, of which 2 are attention, with 32 experts of which 4 are used. tfla is "
    "tfla.integrations.transformers.accelerate(model)."
)


def _recurrent_models(call: str) -> list[Entry]:
    """Return two models of transformers on tfla, in PyTorch, and on the package that transformers calls.

    Args:
        call: "model" for prefill and training, "step" for decoding.
    """
    paths = {"tfla": "tfla", "transformers, in PyTorch": "pytorch"}
    packages = {"mamba2": "mamba_ssm", "qwen3_next": "fla"}
    return [
        Entry(
            name, f"tfla.bench.recurrent_models:{call}", {"name": model, "path": path}, group=model,
            needs=packages[model] if path == "packages" else "transformers",
        )
        for model, package in packages.items()
        for name, path in (paths | {f"transformers, on {package}": "packages"}).items()
    ]  # fmt: skip


MIXER_LAYERS = (
    "A layer is all of a mixer: projections, short convolution, recurrence or attention, gates, norm and output "
    "projection, with weights in bfloat16. The backward computes the gradients of the input and of the weights. Sizes "
    "are the defaults of ModelConfig, with heads whose keys have 128 channels; Gated DeltaNet has those of Qwen3-Next."
)


def _mixers(call: str, **options: Any) -> list[Entry]:
    """Return a layer of each mixer of tfla.nn.

    Args:
        call: "layer" for whole sequences, "step" for decoding.
        options: values of other fields of their configs.
    """
    return [Entry(f"tfla {name}", f"tfla.bench.mixers:{call}", {"mixer": name, **options}) for name in get_args(Mixer)]


SUITES = {
    "fig4": Suite(
        f"Figure 4: runtime by sequence length, {TOKENS:,} tokens, 16 heads, dqk 128, dhv 256", "T", LENGTHS,
        _lengths(16, 128, 256),
        (
            *_own(), *_nxai("limit 64", "exp 128", "sig 128", "sig 256"),
            *_fla("simple_gla chunk", "simple_gla fused_chunk", "gla chunk"), *MAMBA,
            *_with(ATTENTION, (32, 128, 128)),
        ),
        sustained_at=(8192,), panels=PANELS,
    ),
    "fig5": Suite(
        "Figure 5: runtime and memory by chunk size, T 8,192, batch 8, 8 heads, dqk 256, dhv 512", "chunk size",
        tuple(2**n for n in range(6, 13)), lambda L: Problem(8, 8192, 8, 256, 512, chunk_size=L),
        (*_own(), *_nxai("sig", "exp")), panels=(BOTH, MEMORY),
    ),
    "fig12": Suite(
        f"Figure 12: runtime and memory beside GLA, {TOKENS:,} tokens, 8 heads, dqk 256, dhv 512", "T", LENGTHS,
        _lengths(8, 256, 512),
        (
            *_own(), *_nxai("limit 64", "exp 128", "sig 128", "sig 256"),
            *_fla("simple_gla chunk", "simple_gla fused_chunk", "gla chunk", "gla fused_chunk"),
        ),
        sustained_at=(8192,),
    ),
    "fig13": Suite(
        f"Figure 13: runtime and memory beside Lightning Attention, {TOKENS:,} tokens, 32 × 128 and 64 × 64", "T",
        LENGTHS, _lengths(32, 128, 128),
        tuple(
            entry
            for H, d in ((32, 128), (64, 64))
            for entry in _with(
                (*_own(papers=False), *_nxai("sig 128", "sig 256"), *_fla("lightning", "simple_gla_constant")),
                (H, d, d), f"{H} × {d}",
            )
        ),
        sustained_at=(8192,),
    ),
    "fig14": Suite(
        "Figure 14: runtime by head dimension, T 8,192, batch 4, dqk = dhv, 4096 in all", "head dim",
        tuple(2**n for n in range(5, 11)), lambda d: Problem(4, 8192, EMBEDDING // d, d, d),
        (
            *_own(papers=False), *_nxai("limit 64", "exp 128", "sig 128"),
            *(replace(e, each=True) for e in _fla("simple_gla chunk", "simple_gla fused_chunk", "gla chunk")),
        ),
        sustained_at=(128,), panels=PANELS,
    ),
    "dims": Suite(
        f"Runtime and memory by head dims, T 8,192, {TOKENS:,} tokens, 4096 wide", "dhv", (64, 128, 256, 512),
        lambda d: Problem(8, 8192, EMBEDDING // d, d, d),
        tuple(
            replace(entry, dqk_factor=factor, group=group)
            for factor, group in ((1.0, "dqk = dhv"), (0.5, "dqk = dhv / 2"))
            for entry in _own()[:2]
        ),
        panels=PANELS,
    ),
    "packed": Suite(
        f"Packed sequences of mixed lengths beside batches of equal ones, {TOKENS:,} tokens, 16 heads, 128 × 256",
        "mean length", (512, 2048, 8192), _lengths(16, 128, 256),
        (
            *_own()[:2], *_packed(_own(papers=False)), *_fla("simple_gla chunk"),
            *_packed(_fla("simple_gla chunk")),
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
        (2048, 8192, TOKENS), _lengths(32, 128, 128), tuple(_delta()), sustained_at=(8192,),
        note="Keys and queries have norm 1. Gates for each channel are in bfloat16, one gate for each step and write "
        "strengths in float32; the backward computes all gradients. The roofline is that of the recurrence, forward "
        "and backward by themselves. Packed sequences have exponentially distributed lengths of mean 2,048.",
    ),
    "delta_decode": Suite(
        "Delta rules and gates by channel: one step of decoding by batch size", "batch", (1, 16, 64, 256),
        lambda B: Problem(B, 1, 32, 128, 128), tuple(_delta_steps()), directions=(FORWARD,), panels=(FORWARD,),
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
        (2048, 8192), lambda T: Problem(max(1, 8192 // T), T, 1, 1, 1), tuple(_recurrent_models("model")), panels=(),
        note=RECURRENT_MODELS,
    ),
    "transformers_steps": Suite(
        "Hugging Face transformers: decoding of one token of each sequence by Mamba-2 and Qwen3-Next of medium size, "
        "after prompts of 1,024 tokens", "batch",
        (1, 16), lambda B: Problem(B, 1024, 1, 1, 1), tuple(_recurrent_models("step")), directions=(FORWARD,),
        panels=(), note=RECURRENT_MODELS,
    ),
    "mixers": Suite(
        f"Mixers of tfla.nn: one layer of width 2,048, {TOKENS // 2:,} tokens", "T", (2048, 8192, 32_768),
        lambda T: Problem(max(1, TOKENS // 2 // T), T, 1, 1, 1), tuple(_mixers("layer")), panels=(), sustained_at=(),
        note=MIXER_LAYERS,
    ),
    "mixers_decode": Suite(
        "Mixers of tfla.nn: one token of each sequence, one layer of width 2,048", "batch", (1, 16, 64),
        lambda B: Problem(B, 4096, 1, 1, 1), tuple(_mixers("step")), directions=(FORWARD,), panels=(), sustained_at=(),
        note=MIXER_LAYERS + " A step is replayed from a CUDA graph. Attention has 4,096 tokens in its cache.",
    ),
    "train": Suite(
        "Training step: 1.4 billion parameters, T 8,192, 8 heads of dqk 128, dhv 256, bfloat16 autocast", "batch",
        (1, 2, 3, 4, 5, 6, 8), lambda B: Problem(B, 8192, 8, 128, 256), tuple(_models(None) + _models("inductor")),
        directions=(STEP,), panels=(), alone=True, sustained_at=(), note=TRAINING,
    ),
    "train_parallel": Suite(
        "Training step on two GPUs: 1.4 billion parameters, T 8,192, 8 heads of dqk 128, dhv 256, bfloat16 autocast",
        "sequences per GPU", (1, 2, 3, 4), lambda B: Problem(B, 8192, 8, 128, 256), tuple(_trained_together(2)),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
        note=TOGETHER + "FSDP is FSDP2's fully_shard of each block and of the rest of the model.",
    ),
    "train_fsdp": Suite(
        "Training step on two GPUs by variants of FSDP2: 1.4 billion parameters, T 8,192, 8 heads of dqk 128, dhv 256, "
        "bfloat16 autocast", "sequences per GPU and pass", (2,), lambda B: Problem(B, 8192, 8, 128, 256),
        tuple(_fsdp_variants(2)), directions=(STEP,), panels=(), alone=True, sustained_at=(), in_a_row=4,
        note=TOGETHER + "A sample is the mean of four steps back to back, as `tfla train` does them. Weights are "
        "gathered and gradients reduced in float32 where nothing else is said. Each row has the "
        "profile of one further step, 'streams': the seconds in which the GPU computes, sends, sends without "
        "computing, and does neither, and those of each stream.",
    ),
    "train_long": Suite(
        "Training step by length on two GPUs: one sequence, 1.4 billion parameters, 8 heads of dqk 128, dhv 256, "
        "bfloat16 autocast", "T", tuple(2**n for n in range(15, 20)), lambda T: Problem(1, T, 8, 128, 256),
        tuple(_trained_on_parts(2, activation_checkpointing=True)),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
        note=TOGETHER + "With activation checkpointing: the backward computes blocks and logits again. Two GPUs share "
        "the steps of the sequence, and parameters by FSDP2.",
    ),
    "context_parallel": Suite(
        "Context parallelism: one sequence on two GPUs, 16 heads, dqk 128, dhv 256", "T", (2**16, 2**18, 2**20),
        lambda T: Problem(1, T, 16, 128, 256), tuple(_on_parts(2)), panels=(), alone=True, sustained_at=(),
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
            *_own(), *_nxai("limit 64", "exp 128", "sig 128"), *_fla("simple_gla chunk", "simple_gla fused_chunk"),
            *_with(ATTENTION, (2, 128, 128)),
        ),
        panels=(), host=True, alone=True,
        note="A rested call finds the host's caches cold; a sustained one comes right after others, and takes as long "
        "as the GPU where that is slower.",
    ),
    "smoke": Suite(
        "Smoke: seconds on any device, to see that everything runs", "T", (64, 128),
        lambda T: Problem(2, T, 2, 16, 32, dtype="float32"),
        (
            *_own()[:2],
            Entry("attention, torch", "tfla.bench.baselines:sdpa", {"backend": "MATH"}, heads=(4, 16, 16)),
        ),
    ),
    "smoke_delta": Suite(
        "Smoke: delta rules and gates by channel, seconds on any device", "T", (64, 128),
        lambda T: Problem(2, T, 2, 16, 32, dtype="float32"),
        tuple(
            Entry("tfla", "tfla.bench.delta:chunk", {"model": model}, form=model, group=name)
            for name, model, _ in (DELTA_MODELS[0], *DELTA_MODELS[3:])
        ),
    ),
    "smoke_mixers": Suite(
        "Smoke: mixers of tfla.nn, seconds on any device", "T", (64, 128),
        lambda T: Problem(2, T, 1, 1, 1, dtype="float32"),
        tuple(_mixers("layer", d_model=32, num_heads=2, mamba_head_dim=16, mamba_state_dim=16)), panels=(),
        sustained_at=(), note=MIXER_LAYERS,
    ),
    "smoke_context": Suite(
        "Smoke: one sequence on two processes, seconds on any device", "T", (64, 128),
        lambda T: Problem(1, T, 2, 8, 16, dtype="float32"), tuple(_on_parts(2)), panels=(), alone=True,
        sustained_at=(),
    ),
    "smoke_fsdp": Suite(
        "Smoke: variants of FSDP2 on two processes, seconds on any device", "T", (64,),
        lambda T: Problem(2, T, 2, 8, 16, dtype="float32"),
        tuple(e for e in _fsdp_variants(2, **TINY) if "gathered" not in e.name),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
        note="bfloat16 weights need autocast, which a CPU's float32 steps do not have.",
    ),
    "smoke_parallel": Suite(
        "Smoke: training on several processes, seconds on any device", "T", (64, 128),
        lambda T: Problem(2, T, 2, 8, 16, dtype="float32"),
        (
            *_trained_together(2, **TINY), _trained_on_parts(2, **TINY)[1],
            replace(_trained_on_parts(2, **TINY, activation_checkpointing=True)[1], group="with checkpointing"),
        ),
        directions=(STEP,), panels=(), alone=True, sustained_at=(),
    ),
}  # fmt: skip
