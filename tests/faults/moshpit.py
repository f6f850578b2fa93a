"""Faults of Moshpit averages and of their law."""

from tests.faults import Fault

FILE = "dynamiq_jax/training/_moshpit.py"
LAW = "dynamiq_jax/training/_moshpit_law.py"
TESTS = ("tests/test_moshpit.py",)

FAULTS = (
    Fault(
        "dead peers send what they have",
        FILE,
        "jnp.where(alive, leaf, jnp.zeros_like(leaf))",
        "leaf",
        TESTS,
    ),
    Fault(
        "a dead peer sends zero times its values",
        FILE,
        "jnp.where(alive, leaf, jnp.zeros_like(leaf))",
        "leaf * alive.astype(leaf.dtype)",
        TESTS,
    ),
    Fault(
        "the mean counts dead peers",
        FILE,
        "living = jnp.maximum(count, 1)",
        "living = lax.axis_size(self.axis)",
        TESTS,
    ),
    Fault(
        "dead peers take the mean of the others",
        FILE,
        "return mean if everybody else jnp.where(alive, mean, own)",
        "return mean",
        TESTS,
    ),
    Fault(
        "every round is over the first axis",
        FILE,
        "names[(first + turn) % len(names)]",
        "names[first % len(names)]",
        TESTS,
    ),
    Fault(
        "all calls begin with the first axis",
        FILE,
        "names[(first + turn) % len(names)]",
        "names[turn % len(names)]",
        TESTS,
    ),
    Fault(
        "masks of rounds are in the wrong order",
        FILE,
        "line.mean(tree, masks[number],",
        "line.mean(tree, masks[-1 - number],",
        TESTS,
    ),
    Fault(
        "lines of the same values have noise of their own",
        FILE,
        "if name not in self.averaged:",
        "if name:",
        TESTS,
    ),
    Fault(
        "lines of other values share their noise",
        FILE,
        "if name not in self.averaged:",
        "if not name:",
        TESTS,
    ),
    Fault(
        "narrow leaves are rounded in each round",
        FILE,
        "return leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf",
        "return leaf",
        TESTS,
    ),
    Fault(
        "keys of each peer pass",
        FILE,
        "key = checks.check_key(key, names)",
        "key = checks.check_key(key, ())",
        TESTS,
    ),
    Fault(
        "the law counts dead peers as averaged",
        LAW,
        "own = dead + (1 - dead ** grid[axis])",
        "own = (1 - dead ** grid[axis])",
        TESTS,
    ),
    Fault(
        "the law has the same dead peers on all lines",
        LAW,
        "own**2 + (1 - own) ** 2 / others)",
        "own)",
        TESTS,
    ),
)
