"""How long a step of a recurrent layer takes, roughly, and how threads divide it."""

from __future__ import annotations

# What one core does in a step: recurrent weights mostly come from its second cache.
_FLOPS_PER_NS = 60.0
_BYTES_PER_NS = 40.0
_SHARED_NS = 6_000  # phases shorter than this are not worth the meeting of threads after each
_NEAR_BYTES = 1 << 20  # of weights: most of a core's second cache
_ROUND_NS = 2e6  # a run can be aborted about this often
FEW_ROWS = 4  # fewer sequences than this are not worth reading the weights for


def moment_ns(weights: int, batch: int, item: int) -> float:
    """So many weights of ``item`` bytes, with all sequences, on one core."""
    return max(2.0 * weights * batch / _FLOPS_PER_NS, weights * item / _BYTES_PER_NS)


def shares_steps(lasts: float, own_bytes: int, directions: int, batch: int, threads: int) -> bool:
    """Whether threads share every moment, which lasts so long, rather than take directions and sequences apart.

    Threads that have sequences of their own never wait for each other, but each reads all weights of its direction. So
    they share where those are more than a core keeps near, or where there are too few sequences for all.
    """
    apart = batch_parts(directions, batch, threads) * directions >= threads and own_bytes <= _NEAR_BYTES
    return threads > directions and lasts >= _SHARED_NS and not apart


def batch_parts(directions: int, batch: int, threads: int) -> int:
    """Into how many parts sequences are split where directions leave threads idle; few share the weights better."""
    return max(1, min(threads // directions, batch // FEW_ROWS))


def moments_at_once(lasts: float) -> int:
    """Moments, each so long for a thread, between which nobody looks whether a run is aborted."""
    return max(1, round(_ROUND_NS / max(1.0, lasts)))
