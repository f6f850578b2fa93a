"""Faults of local SGD."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "the change has the wrong sign",
        "dynamiq_jax/training/_local_sgd.py",
        "lambda before, now: compat.match_varying(before, now) - now,",
        "lambda before, now: now - compat.match_varying(before, now),",
        ("tests/test_local_sgd.py",),
    ),
    Fault(
        "changes are summed, not averaged",
        "dynamiq_jax/training/_local_sgd.py",
        "            AllReduce(find_axes(self.axis_name), mean=True),\n            change,",
        "            AllReduce(find_axes(self.axis_name)),\n            change,",
        ("tests/test_local_sgd.py",),
    ),
    Fault(
        "the first turn comes before the first period",
        "dynamiq_jax/training/_local_sgd.py",
        "(taken >= offset) & (",
        "(taken >= 0) & (",
        ("tests/test_local_sgd.py",),
    ),
    Fault(
        "the outer optimizer forgets its momentum",
        "dynamiq_jax/training/_local_sgd.py",
        "outer={**state.outer, name: outer}",
        "outer=state.outer",
        ("tests/test_local_sgd.py",),
    ),
    Fault(
        "all of a worker's own weights are replaced",
        "dynamiq_jax/training/_local_sgd.py",
        "if not self.mixing:",
        "if True:",
        ("tests/test_local_sgd.py",),
    ),
    Fault(
        "residuals of error feedback are lost",
        "dynamiq_jax/training/_local_sgd.py",
        "state = state._replace(method={**state.method, name: outcome.states})",
        "pass",
        ("tests/test_local_sgd.py::test_a_run_resumes_bit_identically_during_a_delay",),
    ),
    Fault(
        "every device sends whole parameters",
        "dynamiq_jax/training/_local_sgd.py",
        "            specs=self.specs,\n            states=state.method",
        "            specs=P(),\n            states=state.method",
        ("tests/test_local_sgd.py::test_shards_of_a_model_travel_alone",),
    ),
    Fault(
        "fragments are not balanced",
        "dynamiq_jax/training/_fragments.py",
        "key=lambda number: filled[number]",
        "key=lambda number: -filled[number]",
        ("tests/test_local_sgd.py",),
    ),
)
