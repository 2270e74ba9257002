"""The preparation of a run: all options are checked, then its tokens and its configuration are written."""

from __future__ import annotations

from pathlib import Path

from tfla._util.errors import UserError, notice
from tfla._util.files import remove_directory
from tfla.nn import ModelConfig
from tfla.train.checkpoint import step_of
from tfla.train.config import TrainConfig
from tfla.train.data import Batches, Tokens, heldout_windows, prepare_tokens
from tfla.train.documents import unread_options
from tfla.train.initial import architecture, check_backend
from tfla.train.layout import autocast_of, check_layout, tokens_of_pass, uses_bfloat16
from tfla.train.memory import Sharing, check_memory
from tfla.train.ranks import Ranks
from tfla.train.recipe import Schedule
from tfla.train.run_folder import TOKENS_FOLDER, check_changes, read_run_config, write_run_config
from tfla.train.tokenizer import create_tokenizer, load_tokenizer


def prepare_run(config: TrainConfig, run: Path, latest: Path | None, ranks: Ranks) -> tuple[Tokens, ModelConfig]:
    """Check all options of a run, then write its tokens and its configuration. Nothing is written before the checks.

    Args:
        config: the options of the run.
        run: the folder of the run.
        latest: the newest checkpoint of the run, None if it has none.
        ranks: the processes of the run.

    Returns:
        the tokens and the architecture of the model.

    Raises:
        UserError: an option does not fit; the folder is as it was.
    """
    old = read_run_config(run)
    shared = ranks.rows[1] * ranks.steps.parts > 1
    check_changes(old, config, None if latest is None else step_of(latest), sharing=shared)
    for name, why in unread_options(config.data).items():
        given = getattr(config.data, name)
        if old is None or getattr(old.data, name) != given:
            raise UserError(f"data.{name}: got {given!r} {why}")
    text_changed = old is not None and (old.data, old.init_from) != (config.data, config.init_from)
    reuse_tokens = (run / TOKENS_FOLDER).exists() and not text_changed
    if reuse_tokens:
        tokenizer = load_tokenizer(run / TOKENS_FOLDER)
    else:
        tokenizer = create_tokenizer(config.data.tokenizer, config.data.bos_token)
    model = architecture(config, tokenizer, latest, None if old is None else old.model)
    Schedule(config.optim, config.steps)  # raises if its lengths do not fit
    check_layout(config, model, ranks)
    device = ranks.device
    pass_tokens, bfloat16 = tokens_of_pass(config, ranks), uses_bfloat16(config, device)
    kept = config.parallel.reshard_after_forward is False
    sharing = Sharing.of(ranks.sizes, config.parallel.gather_dtype == "bfloat16", kept)
    warning = check_memory(
        model, pass_tokens, bfloat16, device, sharing, config.activation_checkpointing, config.compile
    )
    with autocast_of(config, device):
        check_backend(model, device, packed=config.reset == "cu_seqlens")

    def accept(tokens: Tokens) -> None:
        Batches(tokens, config.context, config.batch_size, config.seed)
        heldout_windows(tokens, config.context, config.eval_windows)
        write_run_config(old, config)

    if (run / TOKENS_FOLDER).exists() and not reuse_tokens:
        remove_directory(run / TOKENS_FOLDER)  # left by a run without checkpoints
    tokens = prepare_tokens(config.data, run / TOKENS_FOLDER, accept, tokenizer)
    if warning is not None:
        notice(warning)
    return tokens, model
