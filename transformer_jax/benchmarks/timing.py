"""Fair timing: systems take turns, so that noise hits all of them alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

Name = TypeVar("Name")


class Job(NamedTuple):
    """One system's work in one round.

    Attributes:
        call: what is timed; returns when the work is done.
        count: result of `call` -> tokens; not timed.
    """

    call: Callable[[], Any]
    count: Callable[[Any], int]


class Decoding(NamedTuple):
    """One prepared call.

    Attributes:
        call: what is timed.
        outputs: what it returned -> token ids of each row, without END.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], list[list[int]]]


class Measured(NamedTuple):
    """What one system took.

    Attributes:
        seconds: one a call, of all rounds.
        rates: tokens a second, one a round.
    """

    seconds: list[float]
    rates: list[float]

    def summary(self) -> dict[str, Any]:
        """Return median and 95th percentile of a call, median of the rates."""
        p50, p95 = np.percentile(self.seconds, (50, 95))
        return {
            "calls": len(self.seconds),
            "p50_ms": _rounded(1e3 * p50),
            "p95_ms": _rounded(1e3 * p95),
            "tokens_per_second": _rounded(np.median(self.rates)),
        }


def interleaved(
    jobs: Mapping[Name, Callable[[int], Job]],
    *,
    rounds: int,
    seconds: float = 0.0,
    pause: float = 0.0,
) -> dict[Name, Measured]:
    """Measure systems in turn, `rounds` times, every other round backwards.

    Args:
        jobs: name -> job of round r; making it is not timed.
        rounds: how often each has its turn.
        seconds: a turn repeats its call until this time is full, at least once.
        pause: seconds of rest before every turn: threads of the library before may
            spin a fifth of a second until they sleep.
    """
    measured = {name: Measured([], []) for name in jobs}
    for number in range(rounds):
        for name in list(jobs)[:: -1 if number % 2 else 1]:
            job = jobs[name](number)
            time.sleep(pause)
            result, taken = _turn(job.call, seconds)
            measured[name].seconds.extend(taken)
            measured[name].rates.append(job.count(result) * len(taken) / sum(taken))
    return measured


def ratio(ours: Measured, theirs: Measured) -> float:
    """Return the median over rounds of our rate over theirs in the same round."""
    pairs = zip(ours.rates, theirs.rates, strict=True)
    return _rounded(np.median([a / b for a, b in pairs]), 3)


def _turn(call: Callable[[], Any], seconds: float) -> tuple[Any, list[float]]:
    taken: list[float] = []
    while not taken or sum(taken) < seconds:
        start = time.perf_counter()
        result = call()
        taken.append(time.perf_counter() - start)
    return result, taken


def _rounded(value: Any, digits: int = 2) -> float:
    return round(float(value), digits)
