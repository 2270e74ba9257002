"""Serving a language model to requests that come and go: continuous batching with states of constant size.

    python examples/serve.py                                   # a tiny model with random weights, on any machine
    python examples/serve.py --checkpoint runs/mine --slots 64  # a model that `tfla train` has made

The states of all requests are rows of one pool, which prompts and steps read and overwrite where they are. A request
that comes in gets a free row, of a few megabytes however long its prompt is, and the chunkwise kernels read the prompt
into it. A step advances the requests that run, by the rows that they have; on a GPU it is one CUDA graph for each of a
few numbers of requests. A request that is done leaves its row to the next one. What a request gets does not depend on
the other requests of its batch.

A prompt is read by one call, which also returns the states after every part of it. They are kept: a prompt that starts
as an earlier one did, as with a system prompt, is read from the end of the last part that they share. Such a state is
as large as that of any prompt.

With --draft-tokens, each request proposes tokens that followed its latest ones before in its own text. One call
verifies the proposals of all requests, and a request gets those that the model would have chosen, and one more.

Models with attention layers are served as well. Their caches are rows of the pool too, with room for --capacity
tokens of prompt and answer; a request that needs more is refused.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tfla.nn import Decoder, LanguageModel, ModelConfig, ModelState


@dataclass
class Request:
    """A prompt (T,) int64, and the tokens that have been made for it."""

    name: str
    prompt: Tensor
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)


class Server:
    """Greedy decoding of up to ``slots`` requests at a time."""

    def __init__(
        self,
        model: LanguageModel,
        slots: int,
        stop_token: int | None = None,
        part: int = 256,
        prefixes: int = 64,
        capacity: int = 1024,
        draft_tokens: int = 0,
    ) -> None:
        self.model, self.stop_token, self.part, self.prefixes = model, stop_token, part, prefixes
        self.draft_tokens, self.proposed, self.accepted = draft_tokens, 0, 0
        # Tokens of a request for which caches of attention have room; other states have the same size for any number.
        self.capacity = capacity if "attention" in model.config.mixer_counts else None
        self.states: OrderedDict[bytes, ModelState] = OrderedDict()  # by the tokens of a prefix, the last used one last
        self.shared = 0  # tokens of prompts whose state was there already
        room = None if self.capacity is None else self.capacity + draft_tokens  # also for proposals that are refused
        self.pool = model.initial_state(slots, capacity=room)
        self.decoder = Decoder(model, self.pool, batches=[n for n in (1, 2, 4, 8, 16, 32, 64) if n < slots] + [slots])
        self.free = deque(range(slots))
        self.running: dict[int, Request] = {}  # by their rows of the pool
        self.waiting: deque[Request] = deque()
        self.device = model.embedding.weight.device
        self.chosen: dict[int, list[int]] = {}  # tokens by rows that requests have not got; the last one is to be read

    def submit(self, request: Request) -> None:
        """Queues a request after those that wait; ValueError if a cache has no room for it."""
        tokens = len(request.prompt) + request.max_new_tokens
        if self.capacity is not None and tokens > self.capacity:
            raise ValueError(f"{request.name}: got {tokens} tokens, expected at most {self.capacity}, the capacity")
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.no_grad()
    def _admit(self, row: int, request: Request) -> None:
        """Reads the prompt into a row of the pool; its logits give the first token."""
        start, state = self._shared_prefix(request.prompt)
        self.shared += start
        if state is None:
            self.decoder.reset([row])
        else:
            self.decoder.scatter([row], state)
        ids = request.prompt[None, start:].to(self.device)
        hidden, _, states = self.model.prefill(
            ids, self.pool, states_every=self.part, state_indices=self._indices([row])
        )
        for number, each in enumerate(states, 1):
            self._remember(request.prompt[: start + number * self.part], each)
        self.chosen[row] = self.model.logits(hidden[:, -1]).argmax(-1).tolist()
        self.running[row] = request

    def _indices(self, rows: list[int]) -> Tensor:
        """Returns rows of the pool on the device of the model."""
        return torch.tensor(rows, device=self.device)

    def _shared_prefix(self, prompt: Tensor) -> tuple[int, ModelState | None]:
        """Returns the length of the longest prefix whose state is known, short of the last token, and the state."""
        for end in range((len(prompt) - 1) // self.part * self.part, 0, -self.part):
            key = prompt[:end].numpy().tobytes()
            if key in self.states:
                self.states.move_to_end(key)
                return end, self.states[key]
        return 0, None

    def _remember(self, prefix: Tensor, state: ModelState) -> None:
        """Keeps the state after a prefix, in place of the one that has not been used for the longest time."""
        self.states[prefix.numpy().tobytes()] = state
        while len(self.states) > self.prefixes:
            self.states.popitem(last=False)

    def step(self) -> Iterator[Request]:
        """A token or more for every request that runs; yields those that are done with it."""
        while self.free and self.waiting:
            self._admit(self.free.popleft(), self.waiting.popleft())
        for row, request in list(self.running.items()):
            for token in self.chosen[row]:
                request.tokens.append(token)
                if len(request.tokens) == request.max_new_tokens or token == self.stop_token:
                    del self.running[row]
                    self.free.append(row)
                    yield request
                    break
        if self.running and self.draft_tokens:
            self._verify(list(self.running))
        elif self.running:
            rows = list(self.running)
            last = torch.tensor([self.chosen[row][-1] for row in rows], device=self.device)
            tokens = self.decoder.step(last, self._indices(rows)).argmax(-1).tolist()
            self.chosen |= {row: [token] for row, token in zip(rows, tokens, strict=True)}

    @torch.no_grad()
    def _verify(self, rows: list[int]) -> None:
        """Chooses the tokens that requests proposed and the model would have chosen too, and one more."""
        texts = [self.running[row].prompt.tolist() + self.running[row].tokens for row in rows]
        ids = torch.tensor([[text[-1], *propose(text, self.draft_tokens)] for text in texts], device=self.device)
        logits, accept = self.model.steps(ids, self.pool, state_indices=self._indices(rows))
        best = logits.argmax(-1)  # (rows, 1 + draft_tokens), the token after each of ids
        right = (best[:, :-1] == ids[:, 1:]).long().cumprod(1).sum(1)
        accept(right + 1)  # the states after the last token of each text and the proposals that are right
        for row, tokens, count in zip(rows, best.tolist(), right.tolist(), strict=True):
            self.chosen[row] = tokens[: count + 1]
            self.proposed, self.accepted = self.proposed + self.draft_tokens, self.accepted + count


def propose(text: list[int], count: int, longest: int = 3) -> list[int]:
    """What followed the last place where the latest tokens of the text, three or fewer, occurred before."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        for place in range(len(text) - n - 1, -1, -1):
            if text[place : place + n] == text[-n:]:
                found = text[place + n :]
                return (found * count)[:count]
    return text[-1:] * count


def load(checkpoint: str | None, device: str, layers: tuple[str, ...] | None = None) -> LanguageModel:
    """The model of a checkpoint, or a tiny one with random weights and a pattern of mixers."""
    if checkpoint is not None:
        from tfla.train.checkpoint import find_model

        return LanguageModel.from_pretrained(find_model(Path(checkpoint)), device, backend=None)
    torch.manual_seed(0)
    config = ModelConfig(d_model=64, num_blocks=len(layers or "ab"), num_heads=2, vocab_size=256, layers=layers)
    model = LanguageModel(config)
    with torch.no_grad():
        model.norm.weight.mul_(20)  # so that it says something
    return model.to(device)


def main(args: list[str] | None = None) -> list[Request]:
    """Runs requests of all lengths through a server, a few of which come in at every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a run of tfla train, or a saved model")
    parser.add_argument("--slots", type=int, default=4, help="requests that run at a time, rows of the pool")
    parser.add_argument("--requests", type=int, default=12, help="requests in all")
    parser.add_argument("--layers", nargs="+", help="mixers of the tiny model, such as gated_delta_net attention")
    parser.add_argument("--capacity", type=int, default=1024, help="tokens of a request, for attention layers")
    parser.add_argument("--draft-tokens", type=int, default=0, help="tokens that a request proposes at once, up to 31")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(args)
    model = load(options.checkpoint, options.device, options.layers and tuple(options.layers))
    server = Server(model, options.slots, capacity=options.capacity, draft_tokens=options.draft_tokens)
    dice, done = random.Random(0), list[Request]()
    coming = [
        Request(f"request {n}", torch.randint(0, 256, (dice.randint(1, 60),)), dice.randint(1, 20))
        for n in range(options.requests)
    ]
    start = time.perf_counter()
    while coming or server.busy:
        for _ in range(dice.randint(0, 2)):
            if coming:
                server.submit(coming.pop(0))
        for request in server.step():
            done.append(request)
            print(f"{request.name}: {len(request.prompt)} tokens in, {len(request.tokens)} out")
    tokens = sum(len(request.tokens) for request in done)
    print(f"{len(done)} requests, {tokens / (time.perf_counter() - start):,.0f} tokens/s with their prompts")
    if options.draft_tokens:
        print(f"{server.accepted} of {server.proposed} proposed tokens were accepted")
    return done


if __name__ == "__main__":
    main()
