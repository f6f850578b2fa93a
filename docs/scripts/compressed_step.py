"""Figure of recipes/compress.md: the equations of a step before and after `dq.compress`."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

import dynamiq_jax as dq
from dynamiq_jax._rewriting.nodes import StepProgram
from dynamiq_jax._rewriting.origins import origins_of
from dynamiq_jax._rewriting.reading import chosen
from dynamiq_jax._rewriting.schedule import schedule
from dynamiq_jax._rewriting.steps import Compute, Reduce
from dynamiq_jax._rewriting.sums import Selection
from pallas_kernels._jax import equations

EXACT, COMPRESSED, GROUP, OTHER = "C7", "C0", "#dce9f5", "0.93"
LINE = 1.0  # height of a box with one line


@dataclasses.dataclass(frozen=True)
class Box:
    """Box of a column: other equations, or sums."""

    lines: tuple[tuple[str, str], ...]  # text and color of each line
    color: str = OTHER


def train_step(params: Any, x: Any, y: Any) -> Any:
    """Train two layers with one mean for each gradient, and one of the loss."""

    def loss_fn(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean((hidden @ params["v"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    new = {}
    for name, grad in grads.items():
        new[name] = params[name] - 0.1 * lax.pmean(grad, "data")
    return new, lax.pmean(loss, "data")


def columns() -> tuple[list[Box], list[Box]]:
    """Return the boxes of the step as it is, and of the compressed one."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        train_step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False
    )
    shapes = {"w": (128, 256), "b": (256,), "v": (256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    rows = (jax.ShapeDtypeStruct((256, size), jnp.float32) for size in (128, 64))
    args = (params, *rows)
    report = dq.compress(step, "data").report(*args)
    traced = jax.make_jaxpr(step)(*args)
    (outer,) = equations.opened(traced)[0].eqns
    (inner,) = equations.programs_in(outer)
    sums = iter(report.sums)
    before: Iterable[Box | None] = (
        Box((_line(next(sums), before=True),), EXACT) if equation.primitive.name == "psum" else None
        for equation in equations.opened(inner)[0].eqns
    )
    selection = Selection("data", dq.Compression().exact_below)
    scheduled, _ = schedule(chosen(*origins_of(StepProgram(traced)), selection), selection)
    (entered,) = scheduled.steps
    after = (_after(each, report) for each in entered.programs[0].steps)
    return list(_joined(before)), list(_joined(after))


def _after(step: Any, report: Any) -> Box | None:
    if isinstance(step, Compute):
        return None
    assert isinstance(step, Reduce)
    return Box(tuple(_line(each, before=False) for each in report.sums), GROUP)


def _line(each: Any, *, before: bool) -> tuple[str, str]:
    shape = "[{}]".format(",".join(map(str, each.sum.shape)))
    sent = each.bytes_before if before else each.bytes_after
    color = COMPRESSED if each.is_compressed and not before else "k"
    return f"psum {shape}  {sent:,.0f} bytes", color


def _joined(boxes: Iterable[Box | None]) -> Iterator[Box]:
    """Yield boxes of sums, and one for all other equations between them."""
    for is_other, run in itertools.groupby(boxes, key=lambda box: box is None):
        found = list(run)
        if is_other:
            count = len(found)
            yield Box(((f"{count} equation{'s' if count > 1 else ''}", "0.4"),))
        else:
            yield from (box for box in found if box is not None)


def compressed_step() -> plt.Figure:
    """Draw the equations of a step in their order, before and after."""
    before, after = columns()
    figure, axes = plt.subplots(figsize=(7, 3.6))
    titles = ("train_step: four sums", 'dq.compress(train_step, "data"): one group')
    bottoms = []
    for place, (title, boxes) in enumerate(zip(titles, (before, after), strict=True)):
        top = 0.0
        axes.text(place + 0.45, 0.5, title, ha="center", weight="bold")
        for box in boxes:
            height = LINE * len(box.lines)
            color = "none" if box.color == EXACT else box.color
            edge = EXACT if box.color == EXACT else COMPRESSED if box.color == GROUP else "none"
            patch = FancyBboxPatch(
                (place + 0.02, top - height + 0.14),
                0.86,
                height - 0.28,
                boxstyle="round,pad=0,rounding_size=0.03",
                facecolor=color,
                edgecolor=edge,
            )
            axes.add_patch(patch)
            for number, (text, text_color) in enumerate(box.lines):
                middle = top - LINE * (number + 0.5)
                axes.text(place + 0.45, middle, text, ha="center", va="center", color=text_color)
            top -= height
        bottoms.append(top)
    axes.set(xlim=(0, 1.9), ylim=(min(bottoms) - 0.1, 1.2))
    axes.axis("off")
    return figure
