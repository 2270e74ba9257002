"""The table of the layers of transformers that compute with tfla, and of what is replaced in each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from tfla.integrations.transformers import delta_rule, lightning, mamba2, packed
from tfla.integrations.transformers.rebind import with_functions

Function = Callable[..., Any]


class Recurrence(NamedTuple):
    """The parts of the layers of one recurrence that are replaced.

    Attributes:
        name: the name of the recurrence in the field.
        forward: the function that replaces the layer's forward, or None.
        functions: by the global name under which the layer's forward calls it, the function that it calls instead.
        wrappers: by the same kind of name, a function that makes from the original what is called instead.
    """

    name: str
    forward: Function | None = None
    functions: Mapping[str, Function] = {}
    wrappers: Mapping[str, Callable[[Function], Function]] = {}


CONVOLUTION = {"causal_conv1d_fn": packed.keep_sequences_apart}
MAMBA2 = Recurrence(
    "Mamba-2",
    functions={
        "mamba2_chunk_scan": mamba2.scan,
        "mamba2_selective_state_update": mamba2.step,
        "mamba2_split_conv1d_scan_combined": mamba2.skip_fused_layer,
    },
    wrappers=CONVOLUTION,
)
GATED_DELTA_NET = Recurrence(
    "Gated DeltaNet",
    functions={
        "torch_chunk_gated_delta_rule": delta_rule.gated_delta_rule,
        "torch_recurrent_gated_delta_rule": delta_rule.gated_delta_rule,
    },
    wrappers=CONVOLUTION,
)
KDA = Recurrence(
    "Kimi Delta Attention",
    functions={
        "chunk_kimi_delta_attention": delta_rule.kimi_delta_attention,
        "recurrent_kimi_delta_attention": delta_rule.kimi_delta_attention,
    },
    wrappers=CONVOLUTION,
)
LIGHTNING = Recurrence("Lightning Attention", forward=lightning.forward)

# By the class of a layer: its recurrence.
LAYERS = {
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "Mamba2Mixer": MAMBA2,
    "NemotronHMamba2Mixer": MAMBA2,
    "Zamba2MambaMixer": MAMBA2,
    "OlmoHybridGatedDeltaNet": GATED_DELTA_NET,
    "Qwen3NextGatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5GatedDeltaNet": GATED_DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": GATED_DELTA_NET,
    "Qwen4ExpTextGatedDeltaNet": GATED_DELTA_NET,
    "BailingHybridDeltaAttention": KDA,
    "Glm5NextTextLinearAttention": KDA,
    "KimiLinearDeltaAttention": KDA,
    "MiniMaxLightningAttention": LIGHTNING,
}

# By the class of a recurrent layer that tfla does not compute: why.
REFUSED = {
    **dict.fromkeys(
        ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"),
        "Mamba has a decay for each element of the state, tfla one for each head or key channel",
    ),
    "RecurrentGemmaRglru": "its state is a vector, tfla's a matrix for each head",
    "RwkvSelfAttention": "its state is a vector, tfla's a matrix for each head",
}


def forward_of(layer: nn.Module) -> Function:
    """Return what replaces the forward of a layer of :data:`LAYERS`.

    Raises:
        LookupError: the forward does not call a function that is to be replaced; the message is its name.
    """
    return _replaced_forward(type(layer).forward, LAYERS[type(layer).__name__].name)


@functools.cache
def _replaced_forward(forward: Function, recurrence: str) -> Function:
    """Return what replaces the forward of a class of this recurrence; the same function for all its layers.

    Raises:
        LookupError: the forward does not call a function that is to be replaced; the message is its name.
    """
    (found,) = (each for each in (MAMBA2, GATED_DELTA_NET, KDA, LIGHTNING) if each.name == recurrence)
    if found.forward is not None:
        return found.forward
    constant = {name: functools.partial(_take, function) for name, function in found.functions.items()}
    return with_functions(forward, constant | dict(found.wrappers))


def _take(function: Function, original: Function) -> Function:
    """Return the function that replaces the original."""
    return function
