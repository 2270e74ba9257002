"""Speculative decoding: a draft proposes tokens, the model verifies them in one call and accepts some.

A proposal x, drawn with probability q(x), is accepted with probability min(1, p(x) / q(x)), p being the model's
probabilities. The first one that is not accepted is replaced by a token drawn from max(p - q, 0), normalized; where all
are, one more is drawn from p. The tokens then have the distribution p (Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318). With temperature 0, p is 1 for the likeliest token, and the tokens are those of greedy decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tfla.nn.drafts import Draft, Lookup, ModelDraft, NGram
from tfla.nn.model import LanguageModel
from tfla.nn.proposed import ProposedSteps
from tfla.nn.sampling import Sampling, prefill


def accept_proposals(logits: Tensor, proposed: Tensor, q: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Accept the first of the proposed tokens, and draw the token after them.

    Args:
        logits: (B, K + 1, vocab_size), the model's after the text and after each proposed token.
        proposed: (B, K) int64.
        q: (B, K, vocab_size), the probabilities with which they were drawn; None is 1 for each of them.
        sampling: how the model's tokens are drawn.

    Returns:
        how many proposed tokens are accepted, (B,) int64, and the token after them, (B,) int64.
    """
    (B, K), V = proposed.shape, logits.shape[-1]
    p = sampling.probabilities(logits.flatten(0, 1)).view(B, K + 1, V)
    if q is None:
        q = torch.zeros_like(p[:, :K]).scatter_(-1, proposed[..., None], 1.0)
    p_of, q_of = (t[:, :K].gather(-1, proposed[..., None]).squeeze(-1) for t in (p, q))
    uniform = torch.rand(B, K, generator=sampling.generator, device=p.device, dtype=p.dtype)
    accepted = (uniform * q_of < p_of).long().cumprod(1).sum(1)
    rest = torch.cat([(p[:, :K] - q).clamp(min=0), p[:, K:]], 1)
    at = accepted[:, None, None].expand(-1, 1, V)
    rest, p = rest.gather(1, at)[:, 0], p.gather(1, at)[:, 0]
    # Where p and q are equal but for rounding, nothing may be left.
    return accepted, sampling.draw_from(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p))


@torch.no_grad()
def speculate(
    model: LanguageModel,
    draft: LanguageModel | NGram,
    ids: Tensor,
    max_new_tokens: int,
    draft_tokens: int,
    sampling: Sampling,
    stop_token: int | None,
    cuda_graph: bool | None,
) -> Iterator[Tensor]:
    """Yield what :func:`tfla.nn.generate` does with a draft, for arguments that have been checked.

    Sequences of a batch accept different numbers of tokens. A token is yielded once all sequences have theirs; those
    that have all of their tokens wait for the others.
    """
    B, T = ids.shape
    total = T + max_new_tokens
    text = torch.cat([ids, ids.new_zeros(B, max_new_tokens + draft_tokens)], 1)
    logits, state = prefill(model, ids)
    capacity = total + 2 * draft_tokens + 1  # a sequence that waits still writes proposals into its cache
    steps = ProposedSteps(model, state, draft_tokens + 1, capacity=capacity, cuda_graph=cuda_graph)
    source: Draft
    if isinstance(draft, NGram):
        source = Lookup(draft, draft_tokens)
    else:
        source = ModelDraft(draft, ids, draft_tokens, sampling, capacity, cuda_graph)
    finite = logits.isfinite().all()
    text[:, T] = sampling.draw(logits)[0]
    length = torch.full((B,), T + 1, device=ids.device)
    stopped = torch.zeros(B, dtype=torch.bool, device=ids.device)
    ahead = torch.arange(draft_tokens + 1, device=ids.device)
    yielded = T
    while True:
        # The one synchronization of a round: how many tokens every sequence has.
        shortest, all_finite = torch.stack([length.min(), finite.long()]).tolist()
        if not all_finite:
            raise ValueError(
                "logits: got NaN or infinity, expected finite numbers: the model's weights or its state are not finite"
            )
        for token in text[:, yielded : min(shortest, total)].unbind(1):
            new = token.clone()
            if stop_token is not None:
                new = torch.where(stopped, stop_token, new)
                stopped |= new == stop_token
            yielded += 1
            last = yielded == total or (stop_token is not None and bool(stopped.all()))
            yield new
            if last:
                return
        proposed, q = source.propose(text, length)
        inputs = torch.cat([text.gather(1, length[:, None] - 1), proposed], 1)
        logits = steps.verify(inputs)
        running = length < total
        finite &= (logits.isfinite().all(-1).all(-1) | ~running).all()
        accepted, after = accept_proposals(torch.where(logits.isfinite(), logits, 0.0), proposed, q, sampling)
        new = torch.where(ahead == accepted[:, None], after[:, None], torch.cat([proposed, after[:, None]], 1))
        place = (length[:, None] + ahead).clamp(max=text.shape[1] - 1)
        written = (ahead <= accepted[:, None]) & running[:, None]
        text.scatter_(1, place, torch.where(written, new, text.gather(1, place)))
        lengths = torch.where(running, accepted + 1, 0)
        steps.accept(lengths)
        source.accept(inputs, lengths)
        length = length + lengths
