"""Forms on their meshes, their losses and states, and the bytes that they send."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._inputs.shards import over
from dynamiq_jax._inspection.collectives import CompiledCollective, collectives_of
from dynamiq_jax._inspection.devices import Devices
from tests.compress import global_meshes  # noqa: F401
from tests.compress.global_forms import FORMS, Form, Place, Step

OPTIONS = dq.Compression(exact_below=256)
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
CASES = [(name, kind) for name, form in FORMS.items() for kind in KINDS if form.runs_on(kind)]


def placed(form: Form, kind: str) -> tuple[Any, Mesh, Step]:
    """A form on a mesh, as the context in which it runs, the mesh, and the step."""
    mesh = form.mesh(KINDS[kind])
    around = jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext()
    with around:
        return around, mesh, form.make(Place(mesh))


def run(step: Any, made: Step, count: int = 3) -> tuple[np.ndarray, Any]:
    """Losses and the arrays of the last state of some steps."""
    first = jax.tree.map(lambda leaf: leaf, made.state)  # objects are updated in place
    state, losses = first, []
    for _ in range(count):
        state, loss = step(state, *made.batch)
        # The compiler may place results otherwise than arguments, which would be another program.
        state = jax.tree.map(_like, state, made.state)
        losses.append(float(loss))
    return np.array(losses), jax.tree.map(_as_numpy, state)


def _like(new: Any, old: Any) -> Any:
    return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new


def _as_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return None
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def sent_over_data(step: Any, made: Step, mesh: Mesh) -> list[CompiledCollective]:
    """Collectives of a step over the workers' axis."""
    return _sent_over_data(step.lower(made.state, *made.batch).compile(), mesh)


def over_data(step: Any, made: Step, mesh: Mesh) -> float:
    """Bytes that a device sends over the workers' axis in a step."""
    return sum(each.bytes for each in sent_over_data(step, made, mesh))


def of_pmean(
    sums: Sequence[Any], made: Step, mesh: Mesh, options: dq.Compression = OPTIONS
) -> float:
    """Bytes that a device sends over the workers' axis for `dq.pmean` of sums.

    Gradients lie as parameters of their shape do, over other axes.
    """
    arrays = [leaf for leaf in jax.tree.leaves(made.state) if isinstance(leaf, jax.Array)]
    places = {leaf.shape: leaf.sharding.spec for leaf in arrays}
    others = set(mesh.axis_names) - {"data"}
    specs = [over(places.get(each.shape, P()), others) for each in sums]

    def mean(tree):
        return dq.pmean(
            tree, "data", key=jax.random.key(0), method=dataclasses.replace(options, specs=specs)
        )

    tree = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec))
        for each, spec in zip(sums, specs, strict=True)
    ]
    mapped = jax.shard_map(
        mean, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    sent = _sent_over_data(jax.jit(mapped).lower(tree).compile(), mesh)
    return sum(each.bytes for each in sent)


def _sent_over_data(program: Any, mesh: Mesh) -> list[CompiledCollective]:
    # That of equinox holds the one of JAX.
    text = getattr(program, "compiled", program).as_text()
    return [each for each in collectives_of(text, Devices.of(mesh)) if "data" in each.axes]
