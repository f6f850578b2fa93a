"""Faults of the count sketch, and of the method that remembers groups beside one."""

from tests.faults import Fault

SKETCH, METHOD = "dynamiq_jax/methods/_count_sketch.py", "dynamiq_jax/methods/_split_sketch.py"

FAULTS = (
    Fault(
        "what goes around the end of a sketch row is lost",
        SKETCH,
        "return wide[:, : self.width] + wide[:, self.width :]",
        "return wide[:, : self.width]",
        ("tests/test_count_sketch.py::test_one_coordinate_alone_comes_back",),
    ),
    Fault(
        "all sketch rows have the same signs",
        SKETCH,
        "((signs << np.uint32(row)) & _SIGN)",
        "(signs & _SIGN)",
        ("tests/test_count_sketch.py::test_rows_collide_independently",),
    ),
    Fault(
        "all sketch rows have the same shifts",
        SKETCH,
        "return CountSketch(shifts, ",
        "return CountSketch(shifts[:, :1].repeat(rows, axis=1), ",
        ("tests/test_count_sketch.py::test_rows_collide_independently",),
    ),
    Fault(
        "all stretches have the same signs",
        SKETCH,
        "jax.random.bits(of_words, (stretches,), jnp.uint32)",
        "jax.random.bits(of_words, (1,), jnp.uint32).repeat(stretches)",
        ("tests/test_count_sketch.py::test_rows_collide_independently",),
    ),
    Fault(
        "hot groups are sketched too",
        METHOD,
        "cold = chosen.put(jnp.zeros((split.room, self.group), jnp.float32), blocks)",
        "cold = blocks",
        ("tests/test_split_sketch.py::test_what_is_hot_is_not_in_the_sketch",),
    ),
    Fault(
        "one sketch row that stands out suffices",
        METHOD,
        "(ordered[0] > least) | (ordered[-1] < -least)",
        "(ordered[-1] > least) | (ordered[0] < -least)",
        ("tests/test_split_sketch.py::test_noise_alone_brings_in_little",),
    ),
    Fault(
        "cells that are not finite are zeros",
        METHOD,
        "jnp.where(is_lost, np.float32(np.nan), kept)",
        "jnp.where(is_lost, np.float32(0), kept)",
        ("tests/test_split_sketch.py::test_nan_and_inf_surface_and_stay_in_no_memory",),
    ),
    Fault(
        "a cell that is not finite spoils the noise of all",
        METHOD,
        "l2_norm(jnp.where(finite, cells, np.float32(0)).reshape(-1), axis=0)",
        "l2_norm(cells.reshape(-1), axis=0)",
        ("tests/test_split_sketch.py::test_what_is_not_finite_spoils_few_other_coordinates",),
    ),
    Fault(
        "what is not finite is remembered",
        METHOD,
        "jnp.where(finite, memory, before)",
        "memory",
        ("tests/test_split_sketch.py::test_nan_and_inf_surface_and_stay_in_no_memory",),
    ),
    Fault(
        "each worker applies the whole of an estimate",
        METHOD,
        "np.float32(1 / call.num_workers)",
        "np.float32(1)",
        ("tests/test_split_sketch.py::test_heavy_hitters_are_recovered_from_the_sketch",),
    ),
    Fault(
        "groups that are not sent are forgotten",
        METHOD,
        "jnp.where(is_hot, hot, jnp.maximum(grown, seen))",
        "jnp.where(is_hot, hot, decay * before + (1 - decay) * seen)",
        (
            "tests/test_split_sketch.py::test_every_group_is_measured_once_at_first_and_then_the_largest_are_sent",
        ),
    ),
    Fault(
        "memories of zeros stay zeros",
        METHOD,
        "jnp.maximum(np.float32(self.growth) * typical, _LEAST)",
        "np.float32(self.growth) * typical",
        ("tests/test_split_sketch.py::test_zeros_in_all_of_a_gradient_do_not_end_the_search",),
    ),
    Fault(
        "a guess is averaged with the first measurement",
        METHOD,
        "jnp.where(guessed, seen, decay",
        "jnp.where(guessed & False, seen, decay",
        ("tests/test_split_sketch.py::test_the_memory_of_a_group_is_a_moving_average",),
    ),
    Fault(
        "groups are first tried in their order",
        METHOD,
        "words.astype(jnp.float32) * np.float32(2.0**-33)",
        "words.astype(jnp.float32) * np.float32(0)",
        (
            "tests/test_split_sketch.py::test_every_group_is_measured_once_at_first_and_then_the_largest_are_sent",
        ),
    ),
    Fault(
        "the sketch has no share of the bytes",
        METHOD,
        "(numbers - width * self.rows) // self.group",
        "numbers // self.group",
        ("tests/test_split_sketch.py::test_the_bits_are_those_asked_for",),
    ),
)
