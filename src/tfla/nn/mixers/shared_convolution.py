"""Short convolutions over steps that several processes share, each of which has the inputs of its own steps.

A span needs the last inputs before it, which are those of the span before, or of several where spans are short. One
all_gather brings the last inputs of all spans, and with states of packed sequences those of each sequence too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.mixers.context import ContextPart
from tfla.nn.mixers.documents import Documents
from tfla.nn.mixers.gather_steps import all_gather
from tfla.nn.mixers.key_values import reads_values
from tfla.nn.mixers.short_convolution import ShortConvolution, after_sequences


class SharedConvolution:
    """The convolutions of one call on the steps of one process.

    Args:
        part: the steps of this process.
        convolutions: the convolutions, all of one size.
        documents: the documents of the steps of this process, by their starts.
        sequences: the packed sequences of the whole row where there are states; else None.
        before: the inputs before the first step, or before each packed sequence; see :meth:`ShortConvolution.forward`.
    """

    def __init__(
        self,
        part: ContextPart,
        convolutions: Sequence[ShortConvolution],
        documents: Documents,
        sequences: Documents | None,
        before: Sequence[Tensor] | None,
    ) -> None:
        self.part, self.convolutions, self.sequences, self.before = part, convolutions, sequences, before
        self.count = convolutions[0].size - 1  # the earlier inputs that an output depends on
        self.spans = [(steps, documents.within(steps)) for steps in part.own]

    def run(self, inputs: Sequence[Tensor], return_state: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs (B, T, channels), and with return_state the inputs before the tokens after the call.

        Args:
            inputs: (B, T, channels) of each convolution.
            return_state: whether the second result is requested; else it is empty.
        """
        widths = [x.shape[-1] for x in inputs]
        ends = torch.cat([self._span_ends(steps, documents, inputs) for steps, documents in self.spans])
        x, batch = None, inputs[0].shape[0]
        if return_state and self.sequences is not None:
            x = torch.cat(list(inputs), -1)
            ends = torch.cat([ends, F.pad(self._own_sequence_ends(x, self.sequences), (0, 2))])
        every = all_gather(ends, 0, self.part.spans.group).unflatten(0, (self.part.spans.size, -1))
        of_sequences = every[:, len(self.spans) * batch :, :, :-2]
        spans = self.part.in_time(every[:, : len(self.spans) * batch].unflatten(1, (len(self.spans), batch)))
        started = self._started(spans)
        carried = None
        if self.before is not None and self.sequences is None:
            carried = torch.cat(list(self.before), -1).to(ends.dtype)
        before = [self._before(spans[..., :-2], started, position, carried) for position in self.part.spans.positions]
        outputs = self._convolve(inputs, torch.stack(before).split(widths, -1))
        if not return_state:
            return outputs, ()
        if self.sequences is None:
            after = self._before(spans[..., :-2], started, len(spans), carried)
        else:
            given = None if self.before is None else torch.cat(list(self.before), -1)
            after = after_sequences(of_sequences.sum(0), given, self.sequences)
        return outputs, tuple(t.contiguous() for t in after.split(widths, -1))

    def _convolve(self, inputs: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of all convolutions, from the inputs before spans, (spans, B, count, channels) each."""
        found = []
        for c, (conv, x) in enumerate(zip(self.convolutions, inputs, strict=True)):
            carried = None
            if self.before is not None and self.sequences is not None:
                carried = conv.carried(self.before[c], self.sequences)
            each = [
                conv(x[:, steps], before[c][s], documents, None if carried is None else carried[:, steps])
                for s, (steps, documents) in enumerate(self.spans)
            ]
            found.append(torch.cat(each, 1))
        return tuple(found)

    def _span_ends(self, steps: slice, documents: Documents, inputs: Sequence[Tensor]) -> Tensor:
        """Return the last inputs of a span, of its last document alone: (B, count, channels of all + 2).

        Two more channels are 1 where a document starts in the span, and the number of inputs that the span has.
        """
        batch, length = inputs[0].shape[0], steps.stop - steps.start
        pairs = zip(self.convolutions, inputs, strict=True)
        last = [conv.last_inputs(x[:, steps], None, documents) for conv, x in pairs]
        marks = last[0].new_full((batch, self.count, 2), min(length, self.count))
        starts = documents.document_start
        marks[..., 0] = 0 if starts is None else starts.any(1).to(marks.dtype)[:, None]
        return torch.cat([*last, marks], -1)

    def _own_sequence_ends(self, x: Tensor, sequences: Documents) -> Tensor:
        """Return those of the last inputs of each packed sequence that this process has, zeros for all others.

        Args:
            x: (1, T, channels), the inputs.
            sequences: the packed sequences of the whole row.

        Returns:
            (sequences, count, channels).
        """
        assert sequences.offsets is not None
        start, end = sequences.offsets[:-1, None], sequences.offsets[1:, None]
        at = end + torch.arange(-self.count, 0, device=x.device)  # in the whole row
        found = x.new_zeros(*at.shape, x.shape[-1])
        for position, steps in zip(self.part.spans.positions, self.part.own, strict=True):
            first, stop = self.part.spans.bounds[position : position + 2]
            own = ((at >= start.clamp(min=first)) & (at < stop))[..., None]
            found = torch.where(own, x[0, (at - first + steps.start).clamp(0, x.shape[1] - 1)], found)
        return found

    def _started(self, spans: Tensor) -> Tensor:
        """Return whether documents start in each span, (all spans, B) bool, and check the lengths of spans.

        Raises:
            ValueError: a span has fewer steps than this process takes it to have. All processes raise it.
        """
        if self.count and reads_values(spans):
            found = [int(n) for n in spans[:, 0, 0, -1]]
            if found != [min(length, self.count) for length in self.part.spans.lengths]:
                raise ValueError(
                    f"x: got spans of {', '.join(map(str, found))} steps, counted up to {self.count}, expected spans "
                    "of equal lengths, or their lengths: pass tfla.distributed.ContextParallel(group, lengths=...)"
                )
        return spans[:, :, :1, -2].squeeze(2) > 0 if self.count else spans.new_zeros(spans.shape[:2], dtype=torch.bool)

    def _before(self, ends: Tensor, started: Tensor, position: int, carried: Tensor | None) -> Tensor:
        """Return the inputs of the document at the beginning of a span before it, (B, count, channels).

        Args:
            ends: (all spans, B, count, channels), the last inputs of spans.
            started: (all spans, B), whether documents start in them.
            position: the place of the span in time, or the number of spans for what comes after all.
            carried: (B, count, channels), the inputs before the first span; None is zeros.
        """
        # Zeros that depend on the exchange, so that every process has it in its backward.
        steps, found, cut = 0, F.pad(ends[0][:, :0], (0, 0, 0, self.count)), None
        for earlier in range(position - 1, -1, -1):
            found = found + self._shifted(ends[earlier], steps, cut)
            steps += self.part.spans.lengths[earlier]
            if steps >= self.count:
                return found
            cut = started[earlier] if cut is None else cut | started[earlier]
        return found if carried is None else found + self._shifted(carried, steps, cut)

    def _shifted(self, ends: Tensor, steps: int, cut: Tensor | None) -> Tensor:
        """Return inputs that are ``steps`` further back, zeros in rows (B,) where ``cut`` is True."""
        found = F.pad(ends[:, steps:], (0, 0, 0, steps)) if steps else ends
        return found if cut is None else found.masked_fill(cut[:, None, None], 0)
