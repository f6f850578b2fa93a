"""Horovod: tensors of one element, or of fewer elements than workers, on 3, 5 and 7 workers."""

import dataclasses

import jax

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

options = dq.Compression(exact_below=0)
for workers in (3, 5, 7):
    tree = {"number": normal(workers), "one": normal(workers, 1), "few": normal(workers, 2)}
    mean = on_workers(
        lambda t: dq.pmean(
            t, "data", key=jax.random.key(0), method=dataclasses.replace(options, method="bf16")
        ),
        tree,
    )
    for name, leaf in tree.items():
        assert (mean[name] == mean[name][0]).all(), (workers, name, "replicas differ")
        assert dq.vnmse(mean[name][0], leaf.mean(0)) < 1e-3, (workers, name)
