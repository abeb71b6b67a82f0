"""All paths of a small lattice and all sequences of slots, in plain loops."""

import itertools
import math
from collections import defaultdict

import numpy as np

from transformer_jax.lattice import Band


def log_sum(values):
    """Log-sum-exp of floats; of none -inf."""
    top = max(values, default=-math.inf)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(value - top) for value in values))


def place(moves, i, j):
    """Where in `moves.weights` of a row the move from i to j stands; None: nowhere."""
    if not isinstance(moves, Band):
        return i, j
    return (j - i, j) if 0 <= j - i < moves.weights.shape[1] else None


def uses(lattice, row, states):
    """Name and place of every weight that a path uses, or None where one is missing."""
    steps = [place(lattice.moves, i, j) for i, j in itertools.pairwise(states)]
    if None in steps:
        return None
    return [
        ("start", (row, states[0])),
        *(("emit", (row, time, state)) for time, state in enumerate(states)),
        *(("moves", (row, *step)) for step in steps),
        ("end", (row, states[-1])),
    ]


def fields(lattice):
    """Float64 weights by name."""
    named = lattice._replace(moves=lattice.moves.weights)._asdict()
    del named["lengths"]
    return {name: np.asarray(value, np.float64) for name, value in named.items()}


def weight(lattice, row, states):
    """Log-weight of one path of a row, -inf where it is none."""
    return _weight(fields(lattice), uses(lattice, row, states))


def paths(lattice, row):
    """States and log-weight of every path of a row."""
    weights, size = fields(lattice), lattice.start.shape[1]
    every = itertools.product(range(size), repeat=int(lattice.lengths[row]))
    found = {path: _weight(weights, uses(lattice, row, path)) for path in every}
    return {path: value for path, value in found.items() if value > -math.inf}


def _weight(weights, used):
    if used is None:
        return -math.inf
    return sum(weights[name][at] for name, at in used)


def posteriors(lattice):
    """Probability that a path of the row uses a weight, by the weights' names."""
    shares = {name: np.zeros(value.shape) for name, value in fields(lattice).items()}
    for row in range(len(lattice.start)):
        found = paths(lattice, row)
        total = log_sum(list(found.values()))
        for states, value in found.items():
            for name, at in uses(lattice, row, states):
                shares[name][at] += math.exp(value - total)
    return shares


def collapse(slots, blank):
    """Merge equal neighbours, drop blanks."""
    output, before = [], blank
    for slot in slots:
        if slot not in (before, blank):
            output.append(slot)
        before = slot
    return tuple(output)


def slots_by_output(log_probs, length, blank):
    """Of every output, its slot sequences and their log-probabilities.

    Of log-probabilities `[T, V]` the first `length` slots.
    """
    log_probs = np.asarray(log_probs, np.float64)
    found = defaultdict(dict)
    for slots in itertools.product(range(log_probs.shape[1]), repeat=length):
        total = sum(log_probs[time, slot] for time, slot in enumerate(slots))
        found[collapse(slots, blank)][slots] = total
    return found
