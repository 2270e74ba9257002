"""The implementations that benchmark setups time: of this library and of others, and copies that bound their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tfla.backends import BACKENDS
from tfla.measure.roofline import DeltaModel
from tfla.nn.config import Mixer

TOKENS, EMBEDDING = 65_536, 4096
Form = Literal["exp", "sigmoid", "step exp", "step sigmoid", "gdn", "kda", "gla"]
DELTA_FORMS: dict[str, DeltaModel] = {"gdn": "gdn", "kda": "kda", "gla": "gla"}
Heads = tuple[int, int, int]  # H, dqk, dhv
GATES: tuple[Form, ...] = ("sigmoid", "exp")


@dataclass(frozen=True)
class Entry:
    """An implementation to time."""

    name: str
    make: str
    """The function "module:name" that takes (problem, **options) and returns a :class:`tfla.measure.problem.Work`."""
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


def own(papers: bool = True) -> list[Entry]:
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


def nxai(*kernels: str) -> list[Entry]:
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


def fla(*kernels: str) -> list[Entry]:
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


def with_heads(entries: Iterable[Entry], heads: Heads, group: str = "") -> list[Entry]:
    """Return entries with other heads and in another group."""
    return [replace(entry, heads=heads, group=group) for entry in entries]


def packed(entries: Iterable[Entry]) -> list[Entry]:
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


def delta_group(name: str, heads: Heads) -> str:
    """Return the name of a model with its heads."""
    return f"{name}, {' × '.join(map(str, heads))}"


def delta() -> list[Entry]:
    """Return the delta rule and GLA of this library and of flash-linear-attention, for each model.

    They are timed by length, packed, and activated: an activated call normalizes q and k and applies the activations of
    gates and write strengths, as calls of layers do.
    """
    made: list[Entry] = []
    for name, model, heads in DELTA_MODELS:
        options = {"model": model}
        entries = [
            Entry("tfla", "tfla.bench.delta:chunk", options, form=model),
            Entry("fla", "tfla.bench.delta:fla_chunk", options, needs="fla", form=model, xs=(8192, TOKENS)),
        ]
        more = [replace(entry, xs=(2048,)) for entry in packed(entries)]
        if model != "gla":
            more += [
                replace(entry, name=f"{entry.name}, activated", options=options | {"activated": True}, xs=(8192,))
                for entry in entries
            ]
        # On Hopper the library chooses another backend than Triton's.
        entries.insert(1, replace(entries[0], name="tfla, triton", options=options | {"backend": "triton"}))
        made += with_heads((*entries, *more), heads, delta_group(name, heads))
    return made


def delta_steps() -> list[Entry]:
    """Return decoding steps of the delta rule and of GLA and a copy of their state, for each model."""
    made: list[Entry] = []
    for name, model, heads in DELTA_STEPS:
        step, options = "tfla.bench.delta:step", {"model": model}
        entries = (
            Entry("tfla", step, options, form="step sigmoid"),
            Entry("tfla, in place", step, options | {"in_place": True}, form="step sigmoid"),
            Entry("device copy of C", "tfla.bench.implementations:copy_state", form="step sigmoid"),
            Entry("fla", "tfla.bench.delta:fla_step", options, needs="fla", form="step sigmoid"),
        )
        made += with_heads(entries, heads, delta_group(name, heads))
    return made


LLAMA_HEADS = (16, 128, 128)


def models(compiler: str | None) -> list[Entry]:
    """Return training steps of language models: of the mLSTM, and of a Llama with the same width and blocks."""
    how = ", torch.compile" if compiler else ""
    options = {"compiler": compiler}
    make = "tfla.bench.training:step"
    entries = [Entry(f"tfla mLSTM{gate}{how}", make, options | {"mixer": f"mlstm_{gate}"}) for gate in ("sig", "exp")]
    llama = f"Llama, 16 heads of 128, cuDNN{how}"
    return [*entries, Entry(llama, make, options | {"mixer": "attention"}, heads=LLAMA_HEADS)]


TINY = {"blocks": 2, "vocab": 30}


def trained_together(gpus: int, **options: Any) -> list[Entry]:
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


def fsdp_variants(gpus: int, **options: Any) -> list[Entry]:
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


def trained_on_parts(gpus: int, **options: Any) -> list[Entry]:
    """Return training steps on one GPU, and on several that share the steps of each sequence and the parameters."""
    make, options = "tfla.bench.parallel_training:step", {"mixer": "mlstm_exp", **options}
    return [
        Entry("tfla mLSTMexp, 1 GPU", make, options),
        Entry(
            f"tfla mLSTMexp, {gpus} GPUs, context parallel", make, options | {"layout": {"cp": gpus}}, processes=gpus
        ),
    ]  # fmt: skip


def on_parts(gpus: int) -> list[Entry]:
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


def recurrent_models(call: str) -> list[Entry]:
    """Return two models of transformers, each with tfla, in PyTorch, and with the package that transformers calls.

    Args:
        call: "model" for prefill and training, "step" for decoding, as a call and replayed from a CUDA graph.
    """
    paths = {"tfla": "tfla", "transformers, in PyTorch": "pytorch"}
    packages = {"mamba2": "mamba_ssm", "qwen3_next": "fla"}
    variants: dict[str, dict[str, Any]] = {"": {}} if call == "model" else {"": {}, ", CUDA graph": {"graph": True}}
    return [
        Entry(
            name + suffix, f"tfla.bench.recurrent_models:{call}", {"name": model, "path": path, **options}, group=model,
            needs=packages[model] if path == "packages" else "transformers",
        )
        for model, package in packages.items()
        for name, path in (paths | {f"transformers, on {package}": "packages"}).items()
        for suffix, options in variants.items()
    ]  # fmt: skip


def mixers(call: str, **options: Any) -> list[Entry]:
    """Return a layer of each mixer of tfla.nn.

    Args:
        call: "layer" for whole sequences, "step" for decoding.
        options: values of other fields of their configs.
    """
    return [Entry(f"tfla {name}", f"tfla.bench.mixers:{call}", {"mixer": name, **options}) for name in get_args(Mixer)]
