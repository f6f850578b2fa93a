"""Inspection of a train step that is compiled, and of the text of a compiled program."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding

from dynamiq_jax._core import MistakeError, check_integer
from dynamiq_jax._inputs.shards import names_of
from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices
from dynamiq_jax._inspection.findings import Argument, Evidence, Finding, findings
from dynamiq_jax._inspection.flow import NO_FLOW, flow_of
from dynamiq_jax._inspection.inspection import Inspection, rows_of
from dynamiq_jax._plan.recording import recording
from pallas_kernels._jax import compat

_numbers = itertools.count()


def inspect(
    step: Callable[..., Any], *args: Any, devices_per_host: int | None = None, **kwargs: Any
) -> Inspection:
    """Compile a train step, list what it sends, and find mistakes that make compression useless.

        print(dq.inspect(train_step, params, opt_state, batch))

    The step is not run. It may be the result of `jax.jit` or any function that can be its argument.
    These mistakes are found:

    - *double reduction*: gradients are summed exactly, by autodiff or another line, and compressed;
    - *not compressed*: gradients are summed exactly only;
    - *whole gradient*: every device sends all of a gradient whose parameters are sharded;
    - *below the threshold*: leaves are so small that most bytes are exact;
    - *one worker*: the axis has nothing to send;
    - *fast link*: the compressed axis is inside a host;
    - *sent and thrown away*: leaves are constant zeros, or nothing uses their sum;
    - *sent repeatedly*: leaves are summed several times, and the results only added up.

    Args:
      step: function that JAX can trace.
      *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`; nothing is donated.
      devices_per_host: devices that share a host, in the order of their ids, where processes do not
        say it: several processes on one host, or virtual devices that stand for hosts.
      **kwargs: keyword arguments of the step.

    Returns:
      An `Inspection`, which is a table as text.

    Raises:
      TypeError: `step` is not callable.
      ValueError: `devices_per_host` is less than 1, or the step itself raises it while traced.
    """
    if not callable(step):
        raise TypeError(f"step={step!r:.80} cannot be called. Give a function and its arguments.")
    if devices_per_host is not None:
        check_integer("devices_per_host", devices_per_host, 1)
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    flow = NO_FLOW
    with recording() as records:
        try:
            if not hasattr(jitted, "trace"):
                lowered = jitted.lower(*args, **kwargs)
            else:
                # Otherwise JAX takes what it traced before, and nothing is recorded. What is traced
                # here must not be what runs later: processes are not compared here.
                with set_xla_metadata(dynamiq_jax_inspect=str(next(_numbers))):
                    traced = jitted.trace(*args, **kwargs)
                    flow = flow_of(traced.jaxpr)
                    lowered = traced.lower()
        except MistakeError as error:
            return Inspection((), (Finding(error.kind, str(error)),), is_compiled=False)
    compiled = lowered.compile()
    arguments = tuple(_arguments((args, kwargs)))
    return inspect_text(
        compiled.as_text(),
        Evidence(
            records=tuple(records), steps=tuple(records.steps), arguments=arguments, flow=flow
        ),
        meshes=[
            *_meshes((args, kwargs, compiled.input_shardings, compiled.output_shardings)),
            *_meshes_of_text(lowered.as_text("hlo", debug_info=True)),
        ],
        devices_per_host=devices_per_host,
    )


def inspect_text(
    text: str,
    known: Evidence = Evidence(),
    *,
    meshes: Iterable[Mesh | Mapping[str, int]] = (),
    devices_per_host: int | None = None,
) -> Inspection:
    """Inspect the text of an optimized HLO program.

    Args:
      known: facts that the text does not have.
      meshes: meshes that the program may be on, beside those of the records. The largest is taken.
      devices_per_host: see `inspect`.
    """
    candidates = [*meshes, *(dict(record.mesh) for record in known.records)]
    mesh = max(candidates, key=_size, default={})
    collectives = tuple(collectives_of(text, Devices.of(mesh, devices_per_host)))
    known = dataclasses.replace(known, collectives=collectives)
    return Inspection(rows_of(collectives), tuple(findings(known)), steps=known.steps)


def _size(mesh: Mesh | Mapping[str, int]) -> tuple[int, int]:
    """Return the number of devices of a mesh, and the number of axes with several devices."""
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    several = [size for size in sizes.values() if size > 1]
    return math.prod(several), len(several)


def _meshes(tree: Any) -> Iterator[Mesh]:
    for leaf in jax.tree.leaves(tree):
        sharding = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            yield sharding.mesh


def _meshes_of_text(text: str) -> Iterator[dict[str, int]]:
    """Yield the meshes that the text of a program before optimization names."""
    for axes in re.findall(r"#sdy\.mesh<\[([^\]]*)\]", text):
        yield {name: int(size) for name, size in re.findall(r'\\?"([^"\\]+)\\?"=(\d+)', axes)}


def _arguments(tree: Any) -> Iterator[Argument]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding, split_over = getattr(leaf, "sharding", None), tuple[str, ...]()
        if isinstance(sharding, NamedSharding):
            names = itertools.chain(*map(names_of, compat.partitions(sharding.spec)))
            split_over = tuple(name for name in names if sharding.mesh.shape[name] > 1)
        where, *rest = path[1:]
        name = f"argument {getattr(where, 'idx', getattr(where, 'key', where))}"
        yield Argument(name + jax.tree_util.keystr(tuple(rest)), jax.numpy.shape(leaf), split_over)
