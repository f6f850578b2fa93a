"""Speeds in the library's cost model: they are those of the result files."""

import pytest

from docs.scripts.advised import gain_of_a_step
from docs.scripts.cpu_tables import cpu_worker_ns
from docs.scripts.gpu_tables import gpu_worker_ps
from docs.scripts.result_files import results_of
from docs.scripts.training_tables import rounds_until
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS
from dynamiq_jax._prediction.islands import PLAIN_STEPS, SPARSE_KINDS, MessageKind
from dynamiq_jax.topologies import Ring


def test_the_speed_of_a_cpu_is_that_of_the_measured_native_codec():
    measured = cpu_worker_ns(threads=2, kept=False)
    assert 0.95 < CODEC_SPEEDS["cpu"].ns_per_coordinate / measured < 1.05


def test_the_speed_of_a_gpu_is_that_of_measured_kernels():
    measured = 1e-3 * gpu_worker_ps()
    assert 0.95 < CODEC_SPEEDS["gpu"].ns_per_coordinate / measured < 1.05


def test_the_codec_times_of_islands_are_measured():
    measured = {row["bits"]: row["ns"] for row in results_of("islands_codec")["rows"]}
    for message in (*SPARSE_KINDS, MessageKind(bits=4.0)):
        times = measured[message.bits]
        assert (message.encode_ns, message.decode_ns) == pytest.approx(
            (times["encode"], times["decode"]), abs=0.06
        )


def test_the_rounds_of_islands_are_measured():
    found = results_of("islands_rounds")
    exact = next(row["mean"] for row in found["rows"] if row["setting"] == "exact")
    for message, name in zip(SPARSE_KINDS, ("0.5", "0.25", "0.11"), strict=True):
        row = next(row for row in found["rows"] if row["setting"] == f"{name} bits")
        rounds = rounds_until([found["before"], *row["mean"]], len(exact), exact[5])
        assert message.rounds == pytest.approx(rounds / 6, abs=0.006)
        assert message.bits == pytest.approx(row["bits"], rel=0.01)  # padding
    steps = {row["run"]: row["steps"] for row in results_of("islands_links")["rows"][:4]}
    ratio = steps["4 bits in every step"] / steps["islands, 4 bits"]
    assert ratio == pytest.approx(PLAIN_STEPS, abs=0.005)


def test_nothing_is_gained_on_nvlink():
    """As the README says: steps are as long as before, within a few percent."""
    gains = [gain_of_a_step("3600gbit", overlap) for overlap in (0.0, 0.5)]
    assert 1 < gains[0] < 1.03 and 0.97 < gains[1] < 0.99


@pytest.mark.parametrize(
    ("kind", "topology"), [("tpu_v5e", "v5e:2x4"), ("tpu_v5p", "v5p:2x2x2"), ("tpu_v6e", "v6e:2x4")]
)
def test_speeds_of_tpus_are_about_those_of_the_schedules(kind, topology):
    """A ring of 8 chips with 8 Mi coordinates, and two slices of 8 chips with 1 Mi on each."""
    result = results_of("aot_tpu")[topology]
    sums = {
        (program["sum"], program["slices"]): program
        for program in result["programs"]
        if program["size"] == 2**23
    }

    def seconds(name: str, slices: int) -> float:
        program = sums[name, slices]
        cycles = program["kernel_cycles"] + program["other_cycles"]
        return 1e-6 * cycles / result["clock_mhz"]

    between_slices = seconds("kernels between slices", 2) - seconds("exact", 2)
    for size, workers, expected in (
        (2**23, 8, seconds("kernels, ring", 1)),
        (2**20, 2, between_slices),
    ):
        predicted = CODEC_SPEEDS[kind].seconds(size, Ring().steps(workers) + 2)
        assert 0.75 < predicted / expected < 1.25
    more = seconds("kernels, all-to-all", 1) - seconds("kernels, ring", 1)
    assert 0.9 < 2**23 * 1e-9 * CODEC_SPEEDS[kind].ns_of_order / more < 1.1
