"""PowerSGD against the communication hook of PyTorch's DDP: 20 steps from the same first factors.

The hook without error feedback: its residual is taken against the mean of all workers, where
`ErrorFeedback` takes what this worker's own gradient contributed, as the paper's algorithm 2 does.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dynamiq_research import PowerSGD
from tests.support import processes
from tests.support.others import package
from tests.support.workers import call_on, simulated

torch = package("torch")
from research.tests.support import powersgd_worker  # noqa: E402

SHAPES = {"a": (48, 40), "b": (96, 56)}
STEPS, WORKERS, RANK = 20, 2, 4


def gradients() -> dict[str, np.ndarray]:
    """Matrices with a common part of low rank, which changes slowly, and noise."""
    rng = np.random.default_rng(0)
    result = {}
    for name, (rows, columns) in SHAPES.items():
        left, right = rng.normal(size=(rows, 6)), rng.normal(size=(6, columns))
        drift = np.cumsum(0.05 * rng.normal(size=(STEPS, 1, rows, 6)), axis=0)
        noise = 0.3 * rng.normal(size=(STEPS, WORKERS, rows, columns))
        result[name] = ((left + drift) @ right + noise).astype(np.float32)
    return result


def first_factors() -> tuple[jax.Array, ...]:
    """The Q that the hook draws, in its order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.RandomState(0).randint(1_000_000_000)))
        return tuple(
            jnp.asarray(torch.randn(1, shape[1], RANK)[0].numpy()) for shape in SHAPES.values()
        )


def test_means_of_20_steps_are_those_of_the_hook(tmp_path):
    drawn = gradients()
    found = processes.run(powersgd_worker.averaged, [(tmp_path, RANK, drawn)] * WORKERS)
    theirs = [means for means, _ in found]

    shapes = tuple(SHAPES.values())
    call = call_on(sum(map(np.prod, shapes)), WORKERS, "all_to_all", shapes=shapes)
    method = PowerSGD(rank=RANK)

    def local(key, values):
        def step(state, inputs):
            reduced = method.all_reduce(inputs, call, key, state)
            return reduced.state, reduced.total

        return jax.lax.scan(step, first_factors(), values)

    flat = np.concatenate(
        [drawn[name].reshape(STEPS, WORKERS, -1) for name in SHAPES], axis=2
    ).swapaxes(0, 1)
    factors, totals = simulated(local)(jax.random.key(0), jnp.asarray(flat))
    ours = np.asarray(totals[0]) / WORKERS
    start = 0
    for number, (name, shape) in enumerate(SHAPES.items()):
        mean = drawn[name].mean(1)
        found = ours[:, start : start + mean[0].size].reshape(mean.shape)
        start += mean[0].size
        expected = theirs[0][name]
        np.testing.assert_array_equal(expected, theirs[1][name])
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(mean).max(), err_msg=name)
        # Far from the gradients themselves: the comparison is of what was lost.
        assert np.sum((expected - mean) ** 2) > 1e-3 * np.sum(mean**2)
        # The factors span the same space; the hook keeps them in another basis.
        q = found[0][1]
        offset = sum(RANK * s[1] for s in shapes[:number])
        q = q[offset : offset + RANK * shape[1]].reshape(shape[1], RANK)
        bases = [np.linalg.qr(basis)[0] for basis in (q, np.asarray(factors[number][0]))]
        overlap = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)
        np.testing.assert_allclose(overlap, 1, atol=1e-4)
