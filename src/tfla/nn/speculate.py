"""Speculative decoding: a draft proposes tokens, the model verifies them in one call and accepts some.

A proposal x that was drawn with probability q(x) is accepted with probability min(1, p(x) / q(x)), where p are the
model's probabilities. The first proposal that is not accepted is replaced by a token drawn from max(p - q, 0),
normalized. If all are accepted, one more token is drawn from p. The tokens then have the distribution p (Leviathan et
al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). With temperature 0, p is 1 for the likeliest token, and the
tokens are those of greedy decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn import fused_step
from tfla.nn.decode import capture_graph, copy_into, copy_state
from tfla.nn.drafts import Draft, Lookup, ModelDraft, NGram
from tfla.nn.model import LanguageModel
from tfla.nn.sampling import Sampling, prefill


def accept_proposals(logits: Tensor, proposed: Tensor, q: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Accept as many of the first proposed tokens as possible, and draw the token after them.

    Args:
        logits: (B, K + 1, vocab_size), the model's logits after the text and after each proposed token.
        proposed: (B, K) int64, the proposed tokens.
        q: (B, K, vocab_size), the probabilities from which they were drawn; None if they were not drawn at random.
        sampling: how the model's tokens are drawn.

    Returns:
        the number of accepted tokens, (B,) int64, and the token after them, (B,) int64.
    """
    (B, K), V = proposed.shape, logits.shape[-1]
    if sampling.greedy:
        likeliest = logits.argmax(-1)
        accepted = (likeliest[:, :K] == proposed).cumprod(1).sum(1)
        return accepted, likeliest.gather(1, accepted[:, None])[:, 0]
    p = sampling.probabilities(logits)
    if q is None:
        q = torch.zeros_like(p[:, :K]).scatter_(-1, proposed[..., None], 1.0)
    p_proposed, q_proposed = (t[:, :K].gather(-1, proposed[..., None]).squeeze(-1) for t in (p, q))  # (B, K)
    uniform = torch.rand(B, K, generator=sampling.generator, device=p.device, dtype=p.dtype)
    accepted = (uniform * q_proposed < p_proposed).cumprod(1).sum(1)
    index = accepted[:, None, None].expand(-1, 1, V)
    # p and q after the accepted tokens, (B, vocab_size); q is 0 where all are accepted.
    p, q = (t.gather(1, index)[:, 0] for t in (p, F.pad(q, (0, 0, 0, 1))))
    rest = (p - q).clamp(min=0)
    # Where p and q differ by rounding alone, the rest may be 0 for all tokens.
    return accepted, sampling.draw_from(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p))


class SpeculativeTexts:
    """The texts of a batch in speculative decoding, to which each round adds the tokens that it accepts.

    A round proposes tokens, verifies them and accepts some. It computes on tensors at fixed addresses and never waits
    for the host, so that one CUDA graph can replay it.

    Args:
        model: the model. A graph reads its weights at the addresses that they have now.
        draft: what proposes tokens.
        ids: (B, T) int64, the prompts. The first token after each prompt is drawn here, before the first round.
        total: the number of tokens of a complete text.
        draft_tokens: the number of tokens proposed at a time, from 1 to 31.
        sampling: how tokens are drawn.
        stop_token: a text is complete once it has this token after its prompt; it then goes on with copies of it.
        cuda_graph: whether to capture a CUDA graph; None captures on a GPU.

    Attributes:
        text: (B, total + draft_tokens) int64.
        length: (B,) int64, the number of tokens of each text; of a complete one at least ``total``.
        finite: () bool, whether all logits of texts were finite.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel | NGram,
        ids: Tensor,
        total: int,
        draft_tokens: int,
        sampling: Sampling,
        stop_token: int | None,
        cuda_graph: bool | None,
    ) -> None:
        B, T = ids.shape
        self.prompt, self.total, self.sampling, self.stop_token = T, total, sampling, stop_token
        logits, state = prefill(model, ids)
        capacity = total + 2 * draft_tokens + 1  # a complete sequence still writes proposals into its cache
        self.state = copy_state(state, capacity)
        fusable = fused_step.unsupported(model, self.state, B * (draft_tokens + 1)) is None
        self.verify = (
            fused_step.FusedStep(model, B * (draft_tokens + 1)).steps
            if fusable
            else functools.partial(model.steps, in_place=True)
        )
        self.source: Draft = (
            Lookup(draft, draft_tokens)
            if isinstance(draft, NGram)
            else ModelDraft(draft, ids, draft_tokens, sampling, capacity)
        )
        self.ahead = torch.arange(draft_tokens + 1, device=ids.device)
        self.text = torch.cat([ids, ids.new_zeros(B, total - T + draft_tokens)], 1)
        self.place = torch.arange(self.text.shape[1], device=ids.device)
        self.finite = logits.isfinite().all()
        # A round changes neither texts nor states if all texts are complete: the capture runs such a round.
        self.length = torch.full((B,), total, device=ids.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if ids.is_cuda and cuda_graph is not False:
            self.graph, self.captured_progress = capture_graph(self._round, ids.device, generator=sampling.generator)
        self.text[:, T] = sampling.draw(logits)[0]
        self.length.fill_(T + 1)
        self.progress = self._complete()

    @torch.no_grad()
    def advance(self) -> None:
        """Make each text that is not complete longer by 1 to draft_tokens + 1 tokens."""
        if self.graph is None:
            self.progress = self._round()
        else:
            self.graph.replay()
            self.progress = self.captured_progress

    def read(self) -> tuple[int, int]:
        """Return the length up to which all texts have tokens, and the length at which the iteration ends.

        The latter is ``total`` until all texts have the stop token. The call waits for the GPU.

        Raises:
            ValueError: logits are not finite.
        """
        length, end, finite = self.progress.tolist()
        if not finite:
            raise ValueError(
                "logits: got NaN or infinity, expected finite numbers: the model's weights or its state are not finite"
            )
        return min(length, end), end

    def _round(self) -> Tensor:
        """Run a round and return the progress, (3,): the two results of `read`, and whether logits are finite."""
        text, length = self.text, self.length
        proposed, q = self.source.propose(text, length)
        inputs = torch.cat([text.gather(1, length[:, None] - 1), proposed], 1)
        logits, accept = self.verify(inputs, self.state)
        running = length < self.total
        # The largest logit is NaN if any is, and soft-capped ones are not infinite.
        self.finite.logical_and_((logits.amax((1, 2)).isfinite() | ~running).all())
        accepted, next_token = accept_proposals(logits, proposed, q, self.sampling)
        accepted = accepted[:, None]
        new = torch.where(self.ahead == accepted, next_token[:, None], F.pad(proposed, (0, 1)))  # (B, K + 1)
        place = (length[:, None] + self.ahead).clamp(max=text.shape[1] - 1)
        written = (self.ahead <= accepted) & running[:, None]
        text.scatter_(1, place, torch.where(written, new, text.gather(1, place)))
        lengths = torch.where(running, accepted[:, 0] + 1, 0)
        copy_into(self.state, accept(lengths))
        self.source.accept(lengths)
        length += lengths
        return self._complete()

    def _complete(self) -> Tensor:
        """Complete the texts that have the stop token, and return the progress."""
        end = self.finite.new_full((), self.total, dtype=torch.int64)
        if self.stop_token is not None:
            found = (self.text == self.stop_token) & (self.place >= self.prompt) & (self.place < self.length[:, None])
            ends = torch.where(found, self.place + 1, self.total).amin(1)
            self.text.masked_fill_(self.place >= ends[:, None], self.stop_token)
            self.length.masked_fill_(ends < self.total, self.total)
            end = ends.amax()
        return torch.stack([self.length.min(), end, self.finite.long()])


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
    """Yield the tokens of :func:`tfla.nn.generate` with a draft, whose arguments have been checked.

    The sequences of a batch accept different numbers of tokens. The tokens of a step are yielded once all sequences
    have theirs, and a sequence that has all of its tokens waits for the others.
    """
    yielded = ids.shape[1]
    texts = SpeculativeTexts(
        model, draft, ids, yielded + max_new_tokens, draft_tokens, sampling, stop_token, cuda_graph
    )
    while True:
        length, end = texts.read()  # the one synchronization of a round
        yield from texts.text[:, yielded:length].t().clone(memory_format=torch.contiguous_format)
        yielded = length
        if yielded == end:
            return
        texts.advance()
