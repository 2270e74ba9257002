"""tfla's language model as a model of transformers, registered with its Auto classes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from tfla.integrations.mamba.scan import check_sequence_ids
from tfla.integrations.transformers.cache import TflaCache, forget_rows
from tfla.integrations.transformers.checkpointing import checkpointed
from tfla.integrations.transformers.configuration import TflaConfig
from tfla.integrations.transformers.left_aligned import left_align
from tfla.integrations.transformers.remote_code import AUTO_MAP, write_module
from tfla.nn.block import Block
from tfla.nn.layers import Unembedding, at_least_float32, input_std
from tfla.nn.mixers.mlstm import MLSTM
from tfla.nn.model import LanguageModel
from tfla.nn.pretrained import check_holds_no_run
from tfla.nn.soft_cap import soft_cap
from tfla.nn.validation import check_document_start, check_ids, embed
from tfla.ops.checks import check_offsets

Rows = dict[str, Tensor | None]  # the documents of a call, as the blocks take them


class TflaBlock(GradientCheckpointingLayer, Block):
    """A block of a :class:`tfla.nn.LanguageModel` whose backward can compute it again, as transformers asks it to.

    Single tokens go through its forward too, so that its hooks see them, for example those that move its inputs to the
    device of its weights.
    """

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        """The checkpointing that transformers has set, with gradients through the tensors inside of states."""
        return functools.partial(checkpointed, self._checkpoint)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, checkpoint: Callable[..., Any]) -> None:
        self._checkpoint = checkpoint

    @_gradient_checkpointing_func.deleter
    def _gradient_checkpointing_func(self) -> None:
        del self._checkpoint

    def forward(self, x: Tensor, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """Run :meth:`Block.forward`, or for one token of each sequence :meth:`Block.step`, which overwrites the state.

        Args:
            x: (B, T, d_model).
            state: the state before the tokens, or None.
            options: the other arguments of :meth:`Block.forward`.
        """
        single = state is not None and x.shape[1] == 1 and not torch.is_grad_enabled()
        # A checkpoint may turn gradients off and read the state again in its backward.
        single = single and not (self.gradient_checkpointing and self.training)
        documents = any(options.get(name) is not None for name in ("document_start", "cu_seqlens"))
        if not single or documents or self._has_hooks_in_mixer():
            return super().forward(x, state, **options)
        y, after = self.step(x[:, 0], state, in_place=_is_writable(state))
        return y[:, None], after

    def _has_hooks_in_mixer(self) -> bool:
        """Return whether a hook or another forward of the mixer or its modules would be left out by a step."""
        modules = (self.mixer, *self.mixer.children())
        return any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in modules)


class TflaPreTrainedModel(PreTrainedModel):
    """The base class of the models, with their configuration, their initial weights and how they are saved."""

    config: TflaConfig
    config_class = TflaConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["TflaBlock"]  # noqa: RUF012
    _input_embed_layer = "embedding"
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the parameters of a module itself, apart from those that were loaded."""
        if isinstance(module, nn.Embedding) or type(module) is nn.Linear:  # one that resize_token_embeddings has made
            nn.init.normal_(module.weight, std=input_std(self.config.d_model))
        elif hasattr(module, "reset_parameters"):
            own = module.parameters(recurse=False)
            loaded = [(p, p.clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
            module.reset_parameters()  # type: ignore[operator]
            for parameter, value in loaded:
                parameter.copy_(value)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, and freeze the parameters that its config freezes.

        The arguments and the result are those of :meth:`transformers.PreTrainedModel.from_pretrained`, which makes new
        parameters.
        """
        found = super().from_pretrained(*args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found  # a tuple with output_loading_info
        if not model.config.input_gate_trainable:
            for module in model.modules():
                if isinstance(module, MLSTM):
                    module.input_gate.requires_grad_(False)
        return found

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model creates its cache itself."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Leave the class as it is: a saved model imports it from tfla, so that its source is not copied."""

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Write the model as transformers does, and a module through which it is loaded by ``trust_remote_code``.

        The arguments are those of :meth:`transformers.PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: the directory holds a run of ``tfla train``, whose config.json would be replaced.
        """
        check_holds_no_run(Path(save_directory))
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            write_module(Path(save_directory))


class TflaModel(TflaPreTrainedModel):
    """The embedding, the blocks and the last norm of a :class:`tfla.nn.LanguageModel`.

    Args:
        config: the architecture.
    """

    def __init__(self, config: TflaConfig) -> None:
        super().__init__(config)
        architecture = config.to_model_config()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(TflaBlock(architecture, index) for index in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TflaCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        document_start: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the normalized residual stream after the last block.

        Args:
            input_ids: (B, T) int64 tokens, or None with inputs_embeds.
            attention_mask: (B, S), nonzero at tokens, with S >= T: earlier columns belong to tokens of the cache.
                Padding may be anywhere in the first call of a batch. A row gets the results that it has alone.
            position_ids: (B, T) int64; a position 0 is the first token of a document. It is read without cu_seqlens and
                document_start; other values have no effect.
            past_key_values: the cache of an earlier call, which this call advances; None is the start of a document.
            inputs_embeds: (B, T, d_model), embeddings in place of input_ids.
            use_cache: whether to return a cache; None is the config's ``use_cache``, and False while training.
            output_hidden_states: whether to return the residual stream before each block, and the result.
            cu_seqlens: (num_sequences + 1,) int, for B = 1: the offsets of packed sequences. ``cu_seq_lens_q``, which
                transformers' collators give, is another name of it.
            document_start: (B, T) bool, as in :meth:`tfla.nn.LanguageModel.forward`.
            seq_idx: (B, T) int, the index of the document to which a token belongs; a document also starts where it
                changes. It is read without cu_seqlens and document_start.
            kwargs: ``return_dict``; further arguments of other models have no effect.

        Returns:
            last_hidden_state (B, T, d_model); past_key_values with ``use_cache``; hidden_states if requested.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: expected exactly one of input_ids and inputs_embeds")
        if input_ids is None:
            assert inputs_embeds is not None
            x = inputs_embeds
        else:
            check_ids(input_ids, "(B, T)", 2, "input_ids")
            x = embed(self.embedding, input_ids, "input_ids")
        name = "inputs_embeds" if input_ids is None else "input_ids"
        if x.shape[1] < 1:
            raise ValueError(f"{name}: got T = 0, expected at least 1")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = past_key_values
        if cache is None and use_cache and not checkpointing:
            cache = TflaCache()
        if cache is not None and not isinstance(cache, TflaCache):
            raise ValueError(f"past_key_values: got {type(cache).__name__}, expected a TflaCache of this model")
        other = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is not None and other is not None:
            raise ValueError("cu_seqlens: got it together with cu_seq_lens_q, its other name, expected one of them")
        cu_seqlens = other if cu_seqlens is None else cu_seqlens
        if cu_seqlens is not None:
            check_offsets(cu_seqlens, x, name)
        check_document_start(document_start, cu_seqlens, x.shape[:2], name)
        if cache is not None:
            cache.check_fits(x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, len(self.blocks))
        state = None if cache is None else cache.state
        aligned = left_align(attention_mask, x.shape[0], x.shape[1], continues=state is not None)
        group = getattr(self.blocks[0].mixer, "context_parallel", None)
        if attention_mask is not None and group is not None:
            _check_no_padding(group, aligned is not None, x)
        if aligned is not None:
            if cu_seqlens is not None or document_start is not None:
                raise ValueError("attention_mask: got padding together with documents, expected at most one of them")
            if seq_idx is not None:
                check_sequence_ids(seq_idx, x, "the embeddings")
            more = _starts(position_ids, None, x, continues=False, divided=False)
            document_start = aligned.starts(more, seq_idx)
            x = aligned.arrange(x)
        elif cu_seqlens is None and document_start is None:
            document_start = _starts(position_ids, seq_idx, x, state is not None, group is not None)
        rows: Rows = {"document_start": document_start, "cu_seqlens": cu_seqlens}

        hidden_states, states = [], []
        for index, block in enumerate(self.blocks):
            if output_hidden_states:
                hidden_states.append(x)
            before = None if state is None else state[index]
            x, after = block(x, before, **rows, return_state=cache is not None)
            states.append(after)
        if cache is not None:
            # Padding is read as a document, and a row of nothing else has not begun.
            after = tuple(states) if aligned is None else forget_rows(tuple(states), aligned.empty)
            cache.advance(after, x.shape[1])
        x = self.norm(x)
        if output_hidden_states:
            hidden_states.append(x)
        if aligned is not None:
            x, hidden_states = aligned.restore(x), [aligned.restore(h) for h in hidden_states]
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache if use_cache else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )


class TflaForCausalLM(TflaPreTrainedModel, GenerationMixin):
    """A :class:`tfla.nn.LanguageModel` as a causal language model of transformers.

    The logits are those of the model with the same weights.

    Args:
        config: the architecture.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TflaConfig) -> None:
        super().__init__(config)
        self.model = TflaModel(config)
        self.lm_head = Unembedding(config.d_model, config.vocab_size, input_std(config.d_model))
        self.vocab_size = config.vocab_size
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TflaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next tokens, and the loss of ``labels``.

        Args:
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: as in
                :meth:`TflaModel.forward`.
            labels: (B, T) int64, compared with the logits of the position before; -100 is left out.
            logits_to_keep: the number of last positions whose logits are computed, 0 for all; or their indices.
            kwargs: those of :meth:`TflaModel.forward`, and of the loss function of transformers.

        Returns:
            loss with labels; logits (B, T, vocab_size), soft-capped, float32 or float64; past_key_values with
            ``use_cache``; hidden_states if requested.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it.
        """
        inputs = inputs_embeds if input_ids is None else input_ids
        if isinstance(inputs, Tensor) and inputs.dim() >= 2:  # of other inputs the model says what is wrong
            # All errors come before the model advances the cache.
            num_kept = _count_kept(logits_to_keep, inputs.shape[1])
            if labels is not None:
                ignored = kwargs.get("ignore_index", -100)
                _check_labels(labels, (inputs.shape[0], num_kept), self.config.vocab_size, ignored)
        out = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **(kwargs | {"return_dict": True}),
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        logits = soft_cap(at_least_float32(logits), self.config.logit_soft_cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`transformers.GenerationMixin.generate`, which starts continuous batching for a paged cache.

        Raises:
            ValueError: the cache is not a TflaCache, or input_ids, all tokens of the sequences, have no more of them
                than the cache.
        """
        _check_cache_implementation(kwargs.get("cache_implementation"))
        _check_new_tokens(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")), kwargs)
        parent: Any = super()
        return parent.generate(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: continuous batching of transformers needs a cache in pages."""
        raise NotImplementedError(
            "init_continuous_batching: got a TflaForCausalLM, whose states have no pages; tfla.nn.Decoder(..., "
            "batches=...) decodes batches of requests that come and go, as examples/serve.py does"
        )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any
    ) -> Any:
        """Refuse a cache that the model does not make, which transformers would leave out with a warning."""
        given = generation_config.cache_implementation
        _check_cache_implementation(given)
        if given is not None and model_kwargs.get("past_key_values") is None:
            generation_config = copy.copy(generation_config)
            generation_config.cache_implementation = None  # no warning, since a TflaCache is what was asked for
        parent: Any = super()
        return parent._prepare_cache_for_generation(generation_config, model_kwargs, *args)

    def to_language_model(self) -> LanguageModel:
        """Return a :class:`tfla.nn.LanguageModel` whose parameters share their memory with those of this model.

        Frozen parameters stay frozen.
        """
        with torch.device("meta"):
            model = LanguageModel(self.config.to_model_config())
        model.load_state_dict({own_name(name): t for name, t in self.state_dict().items()}, assign=True)
        if self.lm_head.weight is self.model.embedding.weight:
            model.unembedding.weight = model.embedding.weight
        for name, parameter in self.named_parameters():
            model.get_parameter(own_name(name)).requires_grad_(parameter.requires_grad)
        return model

    @classmethod
    def from_language_model(cls, model: LanguageModel, **kwargs: Any) -> TflaForCausalLM:
        """Return a model whose parameters share their memory with those of a model of tfla.nn.

        Frozen parameters stay frozen.

        Args:
            model: the model.
            kwargs: further arguments of :class:`TflaConfig`, such as ``eos_token_id``. ``tie_word_embeddings`` is
                whether embedding and unembedding of the model are one parameter.

        Raises:
            TypeError: model is no LanguageModel.
            ValueError: ``tie_word_embeddings`` is not as in the model.
        """
        if not isinstance(model, LanguageModel):
            raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModel of tfla.nn")
        tied = model.unembedding.weight is model.embedding.weight
        if kwargs.setdefault("tie_word_embeddings", tied) != tied:
            raise ValueError(f"tie_word_embeddings: got {not tied}, expected {tied}, as in the model")
        with torch.device("meta"):
            found = cls(TflaConfig(model_type=TflaConfig.model_type, **model.config.to_dict(), **kwargs))
        tensors = model.state_dict()
        found.load_state_dict({name: tensors[own_name(name)] for name in found.state_dict()}, assign=True)
        if tied:
            found.lm_head.weight = found.model.embedding.weight
        for name, parameter in found.named_parameters():
            parameter.requires_grad_(model.get_parameter(own_name(name)).requires_grad)
        return found


def _is_writable(state: Any) -> bool:
    """Return whether the tensors of a state may be overwritten: those of inference mode may not outside of it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return True
    return not any(isinstance(t, Tensor) and t.is_inference() for t in tree_leaves(state))


def _count_kept(logits_to_keep: int | Tensor, steps: int) -> int:
    """Return how many of the positions of a call have logits; values of indices on a GPU are not read.

    Raises:
        ValueError: the number is negative, there is no position of an index, or a mask has another length.
    """
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep: got {logits_to_keep}, expected at least 0")
        return min(logits_to_keep, steps) if logits_to_keep else steps
    index = logits_to_keep
    if index.dtype == torch.bool:
        if tuple(index.shape) != (steps,):
            raise ValueError(f"logits_to_keep: got a mask of shape {tuple(index.shape)}, expected ({steps},)")
        return int(index.sum())
    checked = index.dtype in (torch.int32, torch.int64) and not torch.compiler.is_compiling()
    if checked and index.device.type == "cpu":
        wrong = index[(index < -steps) | (index >= steps)]
        if len(wrong):
            raise ValueError(f"logits_to_keep: got {int(wrong[0])}, expected an index of one of {steps} positions")
    return index.numel()


def _check_labels(labels: Tensor, shape: tuple[int, int], vocab_size: int, ignored: int) -> None:
    """Raise unless labels fit the positions (B, T) that have logits; values on a GPU are not read."""
    check_ids(labels, "(B, T)", 2, "labels")
    if tuple(labels.shape) != shape:
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {shape}, that of logits")
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = labels[((labels < 0) | (labels >= vocab_size)) & (labels != ignored)]
    if len(wrong):
        raise ValueError(
            f"labels: got {int(wrong[0])}, expected {ignored} or from 0 to {vocab_size - 1}, the vocabulary"
        )


def _check_cache_implementation(given: str | None) -> None:
    """Raise unless the argument ``cache_implementation`` of ``generate`` is the cache that the model makes itself."""
    if given not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation: got {given!r}, expected None or 'dynamic', which are a TflaCache: the model makes "
            "it from the states of its blocks, and there are no others"
        )


def _check_new_tokens(input_ids: Any, given: dict[str, Any]) -> None:
    """Raise unless input_ids of ``generate``, which are all tokens, go on behind those of the cache that is given."""
    cache = given.get("past_key_values")
    if not isinstance(cache, TflaCache) or not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        return
    if given.get("inputs_embeds") is None and input_ids.shape[1] <= cache.num_tokens:
        raise ValueError(
            f"input_ids: got {input_ids.shape[1]} tokens, expected more than the {cache.num_tokens} of the cache: all "
            "tokens of the sequences, those of the cache included"
        )


def own_name(name: str) -> str:
    """Return the name that a parameter of a :class:`TflaForCausalLM` has in tfla.nn."""
    return name.removeprefix("model.").replace("lm_head.", "unembedding.")


def _check_no_padding(group: Any, padded: bool, x: Tensor) -> None:
    """Raise on every process of context parallelism if one has padding, which would move tokens between them."""
    from tfla.ops.context_parallel.exchange import gather
    from tfla.ops.context_parallel.group import context_parallel_of

    placement, name = context_parallel_of(group)
    if bool(gather(torch.tensor([int(padded)], device=x.device), name, placement.size).any()):
        raise ValueError("attention_mask: got padding with context parallelism, expected None or no padding")


def _starts(
    position_ids: Tensor | None, seq_idx: Tensor | None, x: Tensor, continues: bool, divided: bool
) -> Tensor | None:
    """Return where documents start (B, T) bool; None where none starts after tokens of its row.

    Args:
        position_ids: (B, T) or (1, T) int64, or None.
        seq_idx: (B, T) int, the index of each token's document, or None.
        x: (B, T, d_model), the embeddings.
        continues: whether tokens of a cache come before, of which some callers give the positions too.
        divided: whether other processes have other tokens of the rows; then all of them return a tensor.

    Raises:
        TypeError, ValueError: positions or indices do not fit.
    """
    starts = None
    if position_ids is not None and not (continues and position_ids.shape[-1] != x.shape[1]):
        B, T = x.shape[:2]
        if tuple(position_ids.shape) not in ((B, T), (1, T), (T,)):
            raise ValueError(f"position_ids: got shape {tuple(position_ids.shape)}, expected ({B}, {T})")
        starts = (position_ids == 0).expand(x.shape[:2])
    if seq_idx is not None:
        check_sequence_ids(seq_idx, x, "the embeddings")
        if divided and starts is None:  # a process does not know the index before its own tokens
            raise ValueError(
                "seq_idx: got a tensor with context parallelism, expected cu_seqlens, document_start or position_ids"
            )
        changes = F.pad(seq_idx.diff(dim=1) != 0, (1, 0))
        starts = changes if starts is None else starts | changes
    if starts is None:
        return None
    # Without a cache a document starts at the first token anyway.
    if not divided and not torch.compiler.is_compiling() and not bool((starts if continues else starts[:, 1:]).any()):
        return None
    return starts


AutoModel.register(TflaConfig, TflaModel, exist_ok=True)
AutoModelForCausalLM.register(TflaConfig, TflaForCausalLM, exist_ok=True)
# The Trainer looks the class up by its name, and shifts labels for label smoothing only if it is here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TflaConfig.model_type] = TflaForCausalLM.__name__
