"""Faults of states: what they belong to, and who compares it."""

from tests.faults import Fault

NAMES = "dynamiq_jax/_buckets/state_names.py"
DRIVER = "dynamiq_jax/_buckets/driver.py"
OPTIMIZER = "dynamiq_jax/_api/optimizer.py"
LOCAL_SGD = "dynamiq_jax/training/_local_sgd.py"
OF_LOCAL_SGD = "dynamiq_jax/training/_local_sgd_state.py"
POLICIES = (
    "tests/test_optimizer.py::test_policies_share_the_states_of_one_kind_and_the_same_leaves",
)
ERRORS = "tests/test_errors.py"
SETTINGS = ("tests/test_local_sgd.py::test_a_state_of_other_settings_is_refused",)

FAULTS = (
    Fault(
        "names do not say which leaves a state belongs to",
        NAMES,
        "json.dumps([kind, list(leaves), facts], default=int)",
        "json.dumps([kind, facts], default=int)",
        (f"{ERRORS}::test_names_of_states_have_every_leaf",),
    ),
    Fault(
        "names do not say how large leaves are",
        DRIVER,
        "[list(self.leaves[index].shape), self.shards.split_of(index)]",
        "[self.shards.split_of(index)]",
        (f"{ERRORS}::test_a_state_of_other_leaves",),
    ),
    Fault(
        "names do not say how leaves are split over devices",
        DRIVER,
        "[list(self.leaves[index].shape), self.shards.split_of(index)]",
        "[list(self.leaves[index].shape)]",
        (f"{ERRORS}::test_a_state_of_leaves_that_are_split_in_another_way",),
    ),
    Fault(
        "names do not say in which order axes split a dimension",
        "dynamiq_jax/_buckets/shards.py",
        "[[dimension, first, count] for",
        "[[dimension, count] for",
        (
            "tests/test_shards.py"
            "::test_leaves_are_split_alike_if_and_only_if_devices_hold_the_same_parts",
        ),
    ),
    Fault(
        "axes that split a dimension together have names of their own",
        "dynamiq_jax/_buckets/shards.py",
        "found[-1][2] + 1 == place",
        "found[-1][2] + 1 < place",
        ("tests/test_shards.py::test_a_run_goes_on_alike_on_another_mesh_with_the_same_shards",),
    ),
    Fault(
        "names do not say which fast axes share a bucket",
        DRIVER,
        "fast = [[axis.name, axis.size] for axis in self.operation.axes.fast]",
        "fast: list[Any] = []",
        (f"{ERRORS}::test_a_state_of_fast_axes_in_another_order",),
    ),
    Fault(
        "parts of a leaf have one name",
        DRIVER,
        'leaves = [f"{leaves[0]}[{bucket.part[0]}:{bucket.part[1]}]"]',
        "return state_name(kind, leaves, bucket.size)",
        ("tests/test_optimizer.py::test_parts_of_a_leaf_have_states_of_their_own",),
    ),
    Fault(
        "a name does not have the kind of a state",
        DRIVER,
        "self.name_of(bucket.method.state_kind, bucket, shapes)",
        'self.name_of("state", bucket, shapes)',
        POLICIES,
    ),
    Fault(
        "a name is that of one method alone",
        DRIVER,
        "self.name_of(bucket.method.state_kind, bucket, shapes)",
        "self.name_of(repr(bucket.method), bucket, shapes)",
        ("tests/test_optimizer.py::test_what_may_change_in_a_run_with_the_same_state",),
    ),
    Fault(
        "names change from process to process",
        NAMES,
        "digest = hashlib.sha256(text.encode()).hexdigest()[:12]",
        'digest = f"{hash(text) % 2**48:012x}"',
        ("tests/test_optimizer.py::test_names_of_states_are_the_same_in_every_process",),
    ),
    Fault(
        "states that a method does not use are passed on",
        NAMES,
        "if not extra and not missing:",
        "if not missing:",
        (f"{ERRORS}::test_a_state_of_another_policy",),
    ),
    Fault(
        "phases of a schedule take the states of all",
        OPTIMIZER,
        "states={name: state.method[name] for name in own[number]},",
        "states=state.method,",
        ("tests/test_schedule.py::test_phases_of_other_leaves_start_from_states_of_their_own",),
    ),
    Fault(
        "plans of other phases count as collectives",
        DRIVER,
        "    with recording.paused():  # nothing is sent\n",
        "    if True:\n",
        ("tests/test_schedule.py::test_a_phase_records_its_own_plan_alone",),
    ),
    Fault(
        "pending changes of another delay are taken over",
        OF_LOCAL_SGD,
        '    if found != wanted:\n        raise ValueError(\n            f"state.pending',
        '    if False:\n        raise ValueError(\n            f"state.pending',
        SETTINGS,
    ),
    Fault(
        "the period of a pending change does not count",
        LOCAL_SGD,
        'f"every_{self.every}_delay_{self.delay}"',
        'f"delay_{self.delay}"',
        SETTINGS,
    ),
    Fault(
        "a state of another outer optimizer is taken",
        LOCAL_SGD,
        "            check_outer(state, name, jax.eval_shape(self.outer.init, part))\n",
        "",
        SETTINGS,
    ),
    Fault(
        "residuals of another method are taken",
        LOCAL_SGD,
        "            check_method(state, name, names)\n",
        "",
        SETTINGS,
    ),
    Fault(
        "a fragment is known by its number alone",
        "dynamiq_jax/training/_fragments.py",
        "[paths[index] for index in sorted(members)], pieces)",
        "[])",
        ("tests/test_local_sgd.py::test_a_state_of_other_parameters_is_refused",),
    ),
    Fault(
        "every synchronization has the same noise",
        LOCAL_SGD,
        "jax.random.fold_in(jax.random.key(self.seed), state.step)",
        "jax.random.key(self.seed)",
        ("tests/test_local_sgd.py::test_every_synchronization_has_noise_of_its_own",),
    ),
    Fault(
        "the outer optimizer gets the weights of one worker",
        LOCAL_SGD,
        "self.outer.update(change, state.outer[name], before)",
        "self.outer.update(change, state.outer[name], fragments.take(params, fragment))",
        ("tests/test_local_sgd.py::test_the_outer_optimizer_decays_the_reference",),
    ),
    Fault(
        "shards of other leaves are gathered",
        "dynamiq_jax/training/_pipelined_state.py",
        "    check_names(",
        "    () and check_names(",
        ("tests/test_pipelined.py::test_shards_of_other_leaves_of_the_same_shapes_are_refused",),
    ),
)
