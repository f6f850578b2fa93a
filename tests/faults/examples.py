"""Faults of the fine-tuning example."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "the topology is ignored",
        "examples/llm/averaging.py",
        "topology=self.topology,\n                seed=seed,",
        "seed=seed,",
        ("tests/test_llm_reduction.py",),
    ),
    Fault(
        "all epochs have the same order",
        "examples/llm/batches.py",
        "np.random.default_rng((seed, epoch))",
        "np.random.default_rng((seed, 0))",
        ("tests/test_llm_data.py",),
    ),
    Fault(
        "white space between turns is learned",
        "examples/llm/chat_template.py",
        "end = len(through.rstrip())",
        "end = len(through)",
        (
            "tests/test_llm_chats.py",
            "tests/test_llm_refusals.py",
        ),
    ),
    Fault(
        "rows that fill up a batch count in the evaluation",
        "examples/llm/evaluation.py",
        "count = int(rows.learned.sum())",
        "count = int(padded.segments.size)",
        ("tests/test_llm_training.py",),
    ),
    Fault(
        "a run resumes with other data",
        "examples/llm/finetuning.py",
        "        digest.update(np.ascontiguousarray(field))\n",
        "        pass\n",
        ("tests/test_llm_runs.py",),
    ),
    Fault(
        "the record of the step of a checkpoint is forgotten",
        "examples/llm/metrics.py",
        'if record["step"] <= steps]',
        'if record["step"] < steps]',
        ("tests/test_llm_runs.py",),
    ),
    Fault(
        "a board has all scalars at one step",
        "examples/llm/metrics.py",
        'add_scalar(name, value, record["step"])',
        "add_scalar(name, value, 0)",
        ("tests/test_llm_runs.py::test_scalars_of_every_record_go_to_a_board",),
    ),
    Fault(
        "a host is as slow as all workers of this machine together",
        "examples/llm/links.py",
        "compute=before / sharing",
        "compute=before",
        ("tests/test_llm_runs.py::test_a_step_between_hosts_is_predicted_from_two_runs",),
    ),
    Fault(
        "records have no metrics of compression",
        "examples/llm/averaging.py",
        "                specs=specs,\n                with_metrics=True,",
        "                specs=specs,",
        ("tests/test_llm_reduction.py",),
    ),
    Fault(
        "documents of a row attend to each other",
        "examples/llm/model.py",
        "segments[:, None, :, None] == segments[:, None, None, :]",
        "segments[:, None, :, None] >= segments[:, None, None, :]",
        ("tests/test_llm_model.py",),
    ),
    Fault(
        "positions go on from one document of a row to the next",
        "examples/llm/packing.py",
        "np.arange(length)",
        "np.arange(start, start + length)",
        ("tests/test_llm_data.py",),
    ),
    Fault(
        "the seed is ignored",
        "examples/llm/reduction.py",
        'averaging.transformation("data", seed,',
        'averaging.transformation("data", 0,',
        ("tests/test_llm_reduction.py",),
    ),
    Fault(
        "the method's state is not updated",
        "examples/llm/reduction.py",
        "return mean, ReductionState(after, norm",
        "return mean, ReductionState(state.all_reduce, norm",
        (
            "tests/test_llm_reduction.py",
            "tests/test_llm_runs.py",
        ),
    ),
    Fault(
        "each device is said to send all of the gradients",
        "examples/llm/reduction.py",
        "return averaging.wire_report(gradients, mesh, fsdp_specs(params, mesh))",
        "return averaging.wire_report(gradients, mesh, P())",
        ("tests/test_llm_reduction.py",),
    ),
    Fault(
        "the method's state is zero in a resumed run",
        "examples/llm/snapshots.py",
        "return self._manager.restore(self.step, args=ocp.args.StandardRestore(abstract))\n",
        "state = self._manager.restore(self.step, args=ocp.args.StandardRestore(abstract))\n"
        "        first, rest = state.optimizer\n"
        "        method = jax.tree.map(lambda leaf: 0 * leaf, first.all_reduce.method)\n"
        "        first = first._replace(all_reduce=first.all_reduce._replace(method=method))\n"
        "        return state._replace(optimizer=(first, rest))\n",
        ("tests/test_llm_runs.py",),
    ),
    Fault(
        "a message that spells a special token has it",
        "examples/llm/special_tokens.py",
        "return match[0].translate(to_stand_ins)",
        "return match[0]",
        (
            "tests/test_llm_chats.py",
            "tests/test_llm_refusals.py",
        ),
    ),
    Fault(
        "tensors are read from the start of their file",
        "examples/llm/stored_tensors.py",
        "file.seek(self.start)",
        "file.seek(8)",
        ("tests/test_llm_checkpoint.py",),
    ),
    Fault(
        "the learning rate falls to zero",
        "examples/llm/training.py",
        "end_value=0.1 * self.learning_rate,",
        "end_value=0.0 * self.learning_rate,",
        ("tests/test_llm_training.py",),
    ),
    Fault(
        "the mean gradient is not clipped",
        "examples/llm/training.py",
        "optax.clip_by_global_norm(self.clip),",
        "optax.identity(),",
        ("tests/test_llm_training.py",),
    ),
    Fault(
        "vectors decay too",
        "examples/llm/training.py",
        "leaf.ndim > 1",
        "leaf.ndim > 0",
        ("tests/test_llm_training.py",),
    ),
    Fault(
        "gradients are divided by each worker's own number of targets",
        "examples/llm/training.py",
        'targets = jax.lax.psum(jnp.sum(rows.learned, dtype=jnp.int32), "data")',
        "targets = workers * jnp.sum(rows.learned, dtype=jnp.int32)",
        ("tests/test_llm_training.py",),
    ),
    Fault(
        "an index may name files above its folder",
        "examples/llm/weight_files.py",
        'if path.anchor or ".." in path.parts:',
        "if path.anchor:",
        ("tests/test_llm_checkpoint.py",),
    ),
)
