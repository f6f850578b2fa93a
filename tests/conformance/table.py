"""The rows of this run, by name, and what the laws make of them."""

import functools
import math

import numpy as np

import dynamiq_jax as dq
from dynamiq_jax.methods import Call, ChunkedMethod
from tests.conformance.rows import chosen
from tests.support.gradients import of_workers
from tests.support.workers import call_on

NUM_WORKERS, SIZE = 4, 20_001  # divides by nothing
MATRIX = (177, 113)  # of as many coordinates: a vector has no rank
ROWS = chosen()
CASES = {name: row.method for name, row in ROWS.items()}
# Three widths, where the default has eight.
TRACED = {name: dq.DynamiQ.paper() if name == "dynamiq" else CASES[name] for name in CASES}
CHUNKED = [name for name, method in CASES.items() if isinstance(method, ChunkedMethod)]


@functools.cache
def gradient() -> np.ndarray:
    return of_workers(1, NUM_WORKERS, SIZE)


def matrix_call() -> Call:
    return call_on(math.prod(MATRIX), NUM_WORKERS, shapes=(MATRIX,))
