"""Faults of what commands and benchmarks share."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "a codec hides under the computation as transfers do",
        "dynamiq_jax/_workshop/advice.py",
        "question.step_seconds + all_reduce.codec + max(0.0, all_reduce.wire - hidden)",
        "question.step_seconds + max(0.0, all_reduce.total - hidden)",
        ("tests/test_advise.py",),
    ),
    Fault(
        "budgets of fewer than five bits are recommended unasked",
        "dynamiq_jax/_workshop/advice.py",
        "option.bits >= 5",
        "option.bits >= 4",
        ("tests/test_advise.py",),
    ),
    Fault(
        "bytes count as bits where two settings break even",
        "dynamiq_jax/_workshop/break_even.py",
        "return 8 * (other_sent - sent)",
        "return (other_sent - sent)",
        ("tests/test_cli.py",),
    ),
    Fault(
        "a known link counts as codec time",
        "dynamiq_jax/_workshop/break_even.py",
        "return max(0.0, result.seconds - wire)",
        "return max(0.0, result.seconds)",
        ("tests/test_cli.py",),
    ),
    Fault(
        "break-even rates are those of a baseline of another size",
        "dynamiq_jax/_workshop/break_even.py",
        "if other.size != result.size or not is_same(other.setting, name):",
        "if not is_same(other.setting, name):",
        ("tests/test_cli.py",),
    ),
    Fault(
        "errors of several steps have an arithmetic mean",
        "dynamiq_jax/_workshop/comparison.py",
        "math.exp(sum(map(math.log, positive)) / len(positive))",
        "(sum(positive) / len(positive))",
        ("tests/test_compare.py",),
    ),
    Fault(
        "the energy that workers have in common grows with their number only",
        "dynamiq_jax/_workshop/error_law.py",
        "agreement * workers**2",
        "agreement * workers",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "all workers of a comparison hold the gradients of the last ones",
        "dynamiq_jax/_workshop/gradient_files.py",
        "{name: leaf[:count] for name, leaf in gradients.items()}",
        "{name: leaf[-count:] for name, leaf in gradients.items()}",
        ("tests/test_compare.py",),
    ),
    Fault(
        "made-up workers have nothing in common",
        "dynamiq_jax/_workshop/gradients.py",
        "np.sqrt(share) * signal + np.sqrt(1 - share) * noise",
        "np.sqrt(share) * noise + np.sqrt(1 - share) * noise",
        (
            "tests/test_cost_model.py",
            "tests/test_cli.py",
            "tests/test_topologies.py",
        ),
    ),
    Fault(
        "errors are relative to the sum that was found",
        "dynamiq_jax/_workshop/simulate.py",
        "(estimate - truth) ** 2, truth**2",
        "(estimate - truth) ** 2, estimate**2",
        ("tests/test_compare.py",),
    ),
    Fault(
        "replicas are equal if their numbers are",
        "dynamiq_jax/_workshop/simulate.py",
        "copies[0].view(np.uint32), each.view(np.uint32)",
        "copies[0], each",
        ("tests/test_compare.py",),
    ),
    Fault(
        "binary units are decimal",
        "dynamiq_jax/_workshop/units.py",
        '"Ki": 2**10',
        '"Ki": 10**3',
        ("tests/test_cli.py",),
    ),
)
