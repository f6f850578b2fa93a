"""Faults of methods that sum single coordinates, RandK and TopK."""

from tests.faults import Fault

RAND, TOP = "dynamiq_jax/methods/_rand_k.py", "dynamiq_jax/methods/_top_k.py"
LARGEST, BUDGET = "dynamiq_jax/methods/_largest.py", "dynamiq_jax/methods/_budget.py"

FAULTS = (
    Fault(
        "places of all steps are the same",
        RAND,
        "jax.random.fold_in(key, _PLACES)",
        "jax.random.key(_PLACES)",
        ("tests/test_rand_k.py",),
    ),
    Fault(
        "the first places are drawn more often",
        RAND,
        "(call.size,), jnp.uint32)",
        "(call.size,), jnp.uint32) >> 28",
        ("tests/test_rand_k.py::test_every_place_is_drawn_as_often_and_pairs_are_independent",),
    ),
    Fault(
        "NaN that is not drawn is not seen",
        RAND,
        "jnp.all(jnp.isfinite(flat))",
        "jnp.all(jnp.isfinite(values))",
        ("tests/test_rand_k.py::test_nan_is_not_hidden_where_it_is_not_drawn",),
    ),
    Fault(
        "one overflow makes the whole bucket NaN",
        RAND,
        "~jnp.any(jnp.isfinite(reduced.total))",
        "~jnp.all(jnp.isfinite(reduced.total))",
        ("tests/test_rand_k.py::test_an_overflow_at_some_places_stays_there",),
    ),
    Fault(
        "the weight is always there",
        RAND,
        "call.size / count if self.unbiased else 1",
        "call.size / count",
        ("tests/test_rand_k.py",),
    ),
    Fault(
        "the weight is not in what a worker applied",
        RAND,
        "put_back(applied, zero)",
        "put_back(applied / weight, zero)",
        ("tests/test_rand_k.py::test_a_weight_makes_the_sum_unbiased",),
    ),
    Fault(
        "a budget is exceeded by one coordinate",
        BUDGET,
        "return max(1, bisect.bisect_right(range(1, most + 1), allowed, key=sent))",
        "return min(most, 1 + bisect.bisect_right(range(1, most + 1), allowed, key=sent))",
        ("tests/test_rand_k.py",),
    ),
    Fault(
        "only some of equal keys are chosen",
        LARGEST,
        "jnp.minimum(equal, count - above[-1])",
        "equal",
        ("tests/test_top_k.py",),
    ),
    Fault(
        "signs decide which values are large",
        TOP,
        "lax.bitcast_convert_type(jnp.abs(values), jnp.uint32)",
        "lax.bitcast_convert_type(values, jnp.uint32)",
        ("tests/test_top_k.py",),
    ),
    Fault(
        "the last worker is left out",
        TOP,
        "lax.fori_loop(0, call.num_workers, add,",
        "lax.fori_loop(0, call.num_workers - 1, add,",
        ("tests/test_top_k.py",),
    ),
    Fault(
        "workers replace the values of others",
        TOP,
        ".add(values, unique_indices=True",
        ".set(values, unique_indices=True",
        ("tests/test_top_k.py",),
    ),
    Fault(
        "indices cost nothing",
        TOP,
        "return _INDEX_BYTES + _VALUE_BYTES[self.values]",
        "return _VALUE_BYTES[self.values]",
        ("tests/test_top_k.py",),
    ),
    Fault(
        "feedback keeps what was not rounded",
        TOP,
        "_put(zeros, self._decode(message)) if call.feedback else None",
        "flat * (_put(zeros, self._decode(message)) != 0) if call.feedback else None",
        ("tests/test_top_k.py",),
    ),
)
