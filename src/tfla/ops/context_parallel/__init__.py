"""Context parallelism: one sequence on several processes, each with a part of its steps (docs/distributed.md).

cuts.py           which steps of which sequence a process has
spans.py          what a span of steps does to the state, and how spans compose
own_states.py     the state and the cotangent that a span leaves by itself
exchange.py       the collective
operator.py       forward and backward: own states, exchange, and the backend from true initial states
registration.py   the same as operators of PyTorch, for torch.compile

The delta rule and gates by channel have transitions.py in place of spans.py, and the other steps in delta_*.py.
"""
