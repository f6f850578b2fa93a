"""Faults of the inspection of train steps."""

from tests.faults import Fault

FINDINGS = "dynamiq_jax/_inspection/findings.py"
COLLECTIVES = "dynamiq_jax/_inspection/collectives.py"
DEVICES = "dynamiq_jax/_inspection/devices.py"
STEP = "dynamiq_jax/_inspection/step.py"
TESTS = ("tests/test_inspect.py",)

FAULTS = (
    Fault(
        "sums of arrays of other sizes count as double reductions",
        FINDINGS,
        "for size in one.sizes if size in names",
        "for size in one.sizes if size not in names",
        TESTS,
    ),
    Fault(
        "losses count as gradients that are not compressed",
        FINDINGS,
        "least = max(_FEW * sum(one.bytes for one in labeled), _SMALL)",
        "least = 0",
        TESTS,
    ),
    Fault(
        "axes of the collective count as shards",
        FINDINGS,
        "set(argument.split_over) - set(record.axes)",
        "set(argument.split_over) & set(record.axes)",
        TESTS,
    ),
    Fault(
        "leaves that are exact by the policy count as small ones",
        FINDINGS,
        'if "exact_below" in why or "too few" in why',
        "if why",
        TESTS,
    ),
    Fault(
        "widened values are those of the optimized program",
        FINDINGS,
        "default=16 if one.is_promoted else widest",
        "default=widest",
        TESTS,
    ),
    Fault(
        "sums over fast axes have to be compressed",
        FINDINGS,
        "groups = {one.groups for one in labeled if scopes.FAST not in one.labels}",
        "groups = {one.groups for one in labeled}",
        TESTS,
    ),
    Fault(
        "one worker is no mistake",
        FINDINGS,
        "if record.num_workers == 1:\n            yield",
        "if record.num_workers == 0:\n            yield",
        TESTS,
    ),
    Fault(
        "bytes of loops count once",
        COLLECTIVES,
        'yield from found(line.called("body"), times * turns, in_branch)',
        'yield from found(line.called("body"), times, in_branch)',
        TESTS,
    ),
    Fault(
        "what the compiler combines belongs to the first part",
        COLLECTIVES,
        "origin = user if len(arrays) > 1 and user.source else line",
        "origin = line",
        TESTS,
    ),
    Fault(
        "operands of asynchronous collectives count as sent",
        COLLECTIVES,
        "arrays = arrays_of(parts_of(line.type)[1])",
        "arrays = line.arrays",
        TESTS,
    ),
    Fault(
        "branches always run",
        COLLECTIVES,
        "yield from found(branch, times, True)",
        "yield from found(branch, times, in_branch)",
        TESTS,
    ),
    Fault(
        "virtual devices share a host",
        DEVICES,
        "return Devices(sizes, None if is_simulated else processes)",
        "return Devices(sizes, processes)",
        TESTS,
    ),
    Fault(
        "plans of steps that were traced before are not recorded",
        STEP,
        "with set_xla_metadata(dynamiq_jax_inspect=str(next(_numbers))):",
        "if True:",
        TESTS,
    ),
    Fault(
        "lines of this library are where sums come from",
        "dynamiq_jax/_inspection/places.py",
        "if not place.file.startswith(_OURS):",
        "if True:",
        TESTS,
    ),
    Fault(
        "scripts run on behind their step",
        "dynamiq_jax/_workshop/scripts.py",
        "raise _CompiledError(text)",
        "pass",
        ("tests/test_doctor.py",),
    ),
    Fault(
        "scripts get the arguments of the command",
        "dynamiq_jax/_workshop/scripts.py",
        "sys.argv = [str(script), *arguments]",
        "sys.argv = [str(script)]",
        ("tests/test_doctor.py",),
    ),
)
