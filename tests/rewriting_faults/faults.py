"""The faults: a file, a text that it has once, and another text."""

from typing import NamedTuple

REWRITING = "dynamiq_jax/_rewriting"
API = "dynamiq_jax/_api"
EQUATIONS = "pallas_kernels/_jax/equations.py"


class Fault(NamedTuple):
    """A replacement in the source."""

    what: str  # that is wrong then
    file: str
    old: str
    new: str
    test: str  # file of `tests/compress` that it is likely to fail
    chosen: str = ""  # part of the names of the tests of that file

    @property
    def options(self) -> list[str]:
        """Options of pytest that choose the tests."""
        return ["-k", self.chosen] if self.chosen else []


def _evaluate(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/evaluate.py", old, new, test, chosen)


def _steps(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/steps.py", old, new, test, chosen)


def _schedule(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/schedule.py", old, new, test, chosen)


def _in_front(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/in_front.py", old, new, test, chosen)


def _origins(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/origins.py", old, new, test, chosen)


def _kinds(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/kinds.py", old, new, test, chosen)


def _sums(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/sums.py", old, new, test, chosen)


def _inner(what: str, old: str, new: str, test: str, chosen: str = "") -> Fault:
    return Fault(what, f"{REWRITING}/inner.py", old, new, test, chosen)


FAULTS = (
    # Sums of a group.
    _evaluate(
        "a sum is left out",
        "return list(totals.values())",
        "return [operands[0], *list(totals.values())[1:]]",
        "test_forms.py",
        "pmean_of_a_tree",
    ),
    _evaluate(
        "one sum is done in place of another of its shape",
        "return list(totals.values())",
        "return [next(t for t in totals.values() if t.shape == o.shape) for o in operands]",
        "test_forms.py",
        "pmean_of_a_tree",
    ),
    _evaluate(
        "a sum is done twice",
        "            totals = compressed(tree)\n",
        "            totals = compressed(compressed(tree))\n",
        "test_forms.py",
        "pmean_of_a_tree",
    ),
    _evaluate(
        "a further axis is left out",
        "tuple(name for name in names if name not in over)",
        "tuple(name for name in names if name not in over and name in over)",
        "test_forms.py",
        "further_axis",
    ),
    _evaluate(
        "a further axis is summed twice",
        "lambda *terms: lax.psum(terms, further), list",
        "lambda *terms: lax.psum(lax.psum(terms, further), further), list",
        "test_forms.py",
        "further_axis",
    ),
    _evaluate(
        "the fast axis is the slow one",
        "return tuple(name for name in self.selection.axes if name in names)",
        "return tuple(name for name in reversed(self.selection.axes) if name in names)",
        "test_groups.py",
        "slow_axis",
    ),
    _evaluate(
        "exact sums of moved terms are left out",
        "_in_order(lambda *terms: lax.psum(terms, axes), terms)",
        "_in_order(lambda *terms: terms, terms)",
        "test_groups.py",
        "leave_a_loop_alone",
    ),
    _steps(
        "a sum is a mean",
        "return AllReduce(axes)",
        "return AllReduce(axes, mean=True)",
        "test_forms.py",
        "psum_and_division",
    ),
    _steps(
        "parts are along another dimension",
        'ReduceScatter(axes, params["scatter_dimension"], params["tiled"])',
        'ReduceScatter(axes, 0, params["tiled"])',
        "test_groups.py",
        "other_layouts",
    ),
    _steps(
        "a gather is along another dimension",
        'AllGather(axes, params["all_gather_dimension"], params["tiled"])',
        'AllGather(axes, 0, params["tiled"])',
        "test_groups.py",
        "gathers",
    ),
    _steps(
        "sums over other axes are in one group",
        "return self.description.operation, self.description.axes, layout, self.workers",
        "return self.description.operation, layout, self.workers",
        "test_groups.py",
        "other_axes",
    ),
    _steps(
        "sums of other layouts are in one group",
        "return self.description.operation, self.description.axes, layout, self.workers",
        "return self.description.operation, self.description.axes, self.workers",
        "test_groups.py",
        "other_layouts",
    ),
    _steps(
        "equations send messages in any order",
        "Messages.of(node.equation),",
        "Messages.NONE,",
        "test_schedule.py",
        "other_messages",
    ),
    # Keys.
    _evaluate(
        "groups have one key",
        "key is None else key, group.number",
        "key is None else key, 0",
        "test_noise.py",
        "sums_of_one_step",
    ),
    _evaluate(
        "steps have one key",
        "if key is None or group.times != 1:",
        "if group.times != 1:",
        "test_noise.py",
    ),
    _evaluate(
        "turns of a loop have one key",
        "if key is None or group.times != 1:",
        "if key is None:",
        "test_noise.py",
        "turns",
    ),
    Fault(
        "workers have keys of their own",
        "dynamiq_jax/_run/on_devices.py",
        "list(leaves.values()), axes, token)",
        "list(leaves.values()), (), token)",
        "test_noise.py",
        "one_key",
    ),
    _evaluate(
        "the key of the user is left out",
        "jax.random.key(0) if key is None else key",
        "jax.random.key(0)",
        "test_noise.py",
        "steps_cancel",
    ),
    # Order.
    _evaluate(
        "no collective waits for an equation with messages",
        "order.remember(order.token_of([token, *results]))",
        "order.token_of([token, *results])",
        "test_schedule.py",
        "other_messages",
    ),
    _evaluate(
        "an equation with messages waits for nothing",
        "values = tuple(_after(token, value) for value in values)",
        "values = tuple(values)",
        "test_schedule.py",
        "other_messages",
    ),
    _evaluate(
        "a loop with messages waits for nothing",
        "delayed[i] = _after(token, values[i])",
        "delayed[i] = values[i]",
        "test_schedule.py",
        "other_messages or loops",
    ),
    Fault(
        "messages inside of equations are not seen",
        EQUATIONS,
        "axes |= collective_axes(each)",
        "collective_axes(each)",
        "test_schedule.py",
        "other_messages",
    ),
    _schedule(
        "effects change places",
        "or (effects and order_matters)",
        "or (effects and not order_matters and False)",
        "test_surroundings.py",
        "order",
    ),
    _schedule(
        "groups have one number",
        "self._num_groups += 1",
        "self._num_groups += 0",
        "test_schedule.py",
        "order_of_the_step",
    ),
    Fault(
        "equations whose results are not used stay",
        f"{REWRITING}/compressed_step.py",
        "equations.without_unused(jax.make_jaxpr(flat)(*leaves.arrays))",
        "jax.make_jaxpr(flat)(*leaves.arrays)",
        "test_schedule.py",
        "not_used",
    ),
    # Loops.
    _schedule(
        "turns of a loop are not counted",
        "_product(self.times, part.times)",
        "self.times",
        "test_loops.py",
        "begin_elsewhere",
    ),
    _schedule(
        "a carry is no total after all, and leaves its loop",
        "if failed := totals - totals_among(left):",
        "if failed := totals - left.keys():",
        "test_loops.py",
        "used_otherwise",
    ),
    _schedule(
        "what a total begins with is summed over the workers",
        "i for i in part.totals if node.traced.inputs[part.carried[i]].number == 0",
        "i for i in part.totals",
        "test_loops.py",
        "begin_elsewhere",
    ),
    _schedule(
        "a sum that leaves a loop has the shape of one turn",
        "shape = equations.shape_of(node.equation.outvars[i])",
        "shape = member.description.shape or equations.shape_of(node.equation.outvars[i])",
        "test_groups.py",
        "shape_that_is_sent",
    ),
    _schedule(
        "a loop that is scheduled again is listed twice",
        "del self.exact[before[0] :]",
        "del self.exact[len(self.exact) :]",
        "test_groups.py",
        "each_sum_once",
    ),
    _in_front(
        "totals of turns stay in their loop",
        "accumulates = frozenset(carried).union(*(each.accumulates for each in members))",
        "accumulates = frozenset[int]()",
        "test_loops.py",
        "sent_as_a_mean",
    ),
    _schedule(
        "every number is zero",
        "if node.traced.inputs[part.carried[i]].number == 0",
        "if node.traced.inputs[part.carried[i]].number is not None",
        "test_loops.py",
        "begin_elsewhere",
    ),
    _inner(
        "a loop runs forward",
        'reverse=params["reverse"],',
        "reverse=False,",
        "test_forms.py",
        "layers_in_a_scan",
    ),
    _inner(
        "branches change places",
        "return lax.switch(index, branches, *operands)",
        "return lax.switch(index, branches[::-1], *operands)",
        "test_forms.py",
        "every_other_step",
    ),
    _inner(
        "a checkpoint is forgotten",
        'params = {**equation.params, "jaxpr": program}',
        'params = {**equation.params, "jaxpr": program, "prevent_cse": False}',
        "test_programs.py",
        "computed_again",
    ),
    _inner(
        "all axes of the mesh become manual",
        "axis_names=set(equations.mapped_axes(equation)),",
        'axis_names=set(params["mesh"].axis_names),',
        "test_forms.py",
        "partly_manual",
    ),
    _inner(
        "shardings of a jit inside are lost",
        'out_shardings=placed("out"),',
        "out_shardings=None,",
        "test_groups.py",
        "shardings",
    ),
    # Linear equations in front of sums.
    _in_front(
        "a sum that is used twice is moved",
        "any(self.uses[key] > 1 for key in keys)",
        "any(self.uses[key] > 2 for key in keys)",
        "test_groups.py",
        "keep_their_values",
    ),
    _in_front(
        "products are linear",
        '_OF_SEVERAL = {"add", "add_any", "sub"}',
        '_OF_SEVERAL = {"add", "add_any", "sub", "mul"}',
        "test_groups.py",
        "keep_their_values",
    ),
    _in_front(
        "a number over a sum is linear",
        'return (second,) if name == "mul" and are_numbers[0] else ()',
        "return (second,) if are_numbers[0] else ()",
        "test_loops.py",
        "number_over",
    ),
    _in_front(
        "terms of 16 bits are divided",
        "equations.dtype_of(node.equation.outvars[0]).itemsize < 4",
        "equations.dtype_of(node.equation.outvars[0]).itemsize < 2",
        "test_loops.py",
        "16_bits",
    ),
    _in_front(
        "terms are divided outside of loops, too",
        "            return self.may_leave",
        "            return True",
        "test_loops.py",
        "keep_their_bits",
    ),
    _in_front(
        "squares are linear",
        '*("squeeze", "transpose"),',
        '*("squeeze", "transpose", "integer_pow", "square"),',
        "test_groups.py",
        "keep_their_values",
    ),
    _in_front(
        "a value that is no sum is summed over the workers",
        "if not members or len(members) + len(carried) < len(keys):",
        "if not members:",
        "test_groups.py",
        "keep_their_values",
    ),
    _in_front(
        "sums of a forward pass are compressed once they leave a loop",
        "why = None if None in whys else selection.why_exact(described, first.params)",
        "why = None",
        "test_groups.py",
        "forward_pass",
    ),
    # Sums that stay exact.
    _origins(
        "gradients of statistics are compressed",
        '            if here == "backward":\n',
        '            if here == "backward" and not path:\n',
        "test_statistics.py",
    ),
    _origins(
        "coefficients of a loss are what its backward pass goes on with",
        "self.facts.read_sums.update(each.sums)",
        "self.facts.read_sums.update(())",
        "test_origins.py",
        "coefficient",
    ),
    _origins(
        "parameters are accumulated gradients",
        "self.facts.read.update(each.arguments)",
        "self.facts.read.update(())",
        "test_origins.py",
        "of_gradients_are_compressed",
    ),
    _origins(
        "loops have one turn",
        "if values == before or not self._all_turns:",
        "if True:",
        "test_origins.py",
        "reads_parameters_later",
    ),
    _origins(
        "derivatives of gradients are a forward pass",
        'return "backward" if is_inside else differentiation_of(scopes)',
        "return differentiation_of(scopes)",
        "test_forms.py",
        "curvature",
    ),
    _kinds(
        "squares of gradients are gradients",
        "result = nonlinear([first, second])",
        "result = high",
        "test_origins.py",
        "breaks_it or no_others",
    ),
    _kinds(
        "changed parameters are gradients",
        "if Kind.GRADIENT in kinds and kind > Kind.GRADIENT:\n        kind = Kind.MIXED",
        "if Kind.GRADIENT in kinds:\n        kind = Kind.GRADIENT",
        "test_origins.py",
        "no_others",
    ),
    _kinds(
        "clipped gradients are none",
        "origin.is_spread or is_one(atom) or _shape(atom) != whole",
        "origin.is_spread",
        "test_origins.py",
        "are_compressed",
    ),
    _kinds(
        "parameters decay by any factor",
        "_LARGEST_DECAY = 0.1",
        "_LARGEST_DECAY = 1.0",
        "test_origins.py",
        "no_others",
    ),
    _kinds(
        "no backward pass goes on by a product",
        'if not (is_scaled or (each.is_same and name in ("mul", "div") and whole <= each.size))',
        "if False",
        "test_origins.py",
        "no_others",
    ),
    _kinds(
        "a backward pass goes on where parameters are normalized",
        '(each.is_same and name in ("mul", "div") and whole <= each.size)',
        "False",
        "test_statistics.py",
        "without_workers",
    ),
    Fault(
        "small sums that large ones need split groups",
        f"{REWRITING}/nodes.py",
        "if node.may_join and is_needed:",
        "if node.may_join and is_needed and not needed:",
        "test_groups.py",
        "does_not_split",
    ),
    Fault(
        "zeros are sent",
        f"{REWRITING}/steps.py",
        "if node.is_zeros:",
        "if node.is_zeros and not node.outputs:",
        "test_origins.py",
        "not_sent",
    ),
    _sums(
        "sums of a forward pass are compressed",
        'if each.differentiation == "forward":',
        'if each.differentiation == "forward" and each.origin == "other":',
        "test_statistics.py",
    ),
    _sums(
        "what a checkpoint computes again is a backward pass",
        'if "rematted_computation" in scopes:',
        'if "rematted_computation" in scopes and not scopes:',
        "test_groups.py",
        "checkpoint",
    ),
    _sums(
        "groups of an axis are compressed",
        'if params.get("axis_index_groups") is not None:',
        'if params.get("axis_index_groups") == ():',
        "test_programs.py",
        "groups_of_an_axis",
    ),
    _sums(
        "sums over the fast axis alone are compressed",
        "if self.axes[0] not in each.axes:",
        "if self.axes[0] not in each.axes and not each.axes:",
        "test_groups.py",
        "other_axes",
    ),
    _sums(
        "the limit of the size is one higher",
        "math.prod(each.shape) * parts < self.exact_below",
        "math.prod(each.shape) * parts <= self.exact_below",
        "test_forms.py",
        "pmean_of_a_tree",
    ),
    _sums(
        "parts of compressed collectives are compressed again",
        "if labels(each.scopes):",
        "if labels(each.scopes) and not each.scopes:",
        "test_programs.py",
        "compressed_already",
    ),
    # The compiled step.
    Fault(
        "no buffer is donated",
        f"{REWRITING}/compressed_step.py",
        "donate_argnums=programs[0].donated",
        "donate_argnums=()",
        "test_programs.py",
        "donated",
    ),
    Fault(
        "a jitted step donates nothing",
        EQUATIONS,
        '            "donate_argnums",\n            "donate_argnames",\n',
        "",
        "test_programs.py",
        "donated",
    ),
    Fault(
        "a jitted step forgets the shardings of its arrays",
        f"{REWRITING}/compressed_step.py",
        "self._run(within, within.of_arrays(shardings))",
        "self._run(within, within.shardings)",
        "test_placement.py",
        "jitted_step",
    ),
    _evaluate(
        "a report does not need specs",
        "            raise unknown_specs(group.automatic)\n",
        "            return None\n",
        "test_placement.py",
        "not_certain",
    ),
    Fault(
        "a buffer that is used again is donated",
        EQUATIONS,
        "and uses[id(variable)] == 1:",
        "and uses[id(variable)] >= 1:",
        "test_surroundings.py",
        "not_taken",
    ),
    Fault(
        "results change places",
        f"{REWRITING}/compressed_step.py",
        "program.results.with_arrays(arrays[:count])",
        "program.results.with_arrays(arrays[:count][::-1])",
        "test_forms.py",
        "pmean_of_a_tree",
    ),
    Fault(
        "bytes of parts are those of the whole",
        f"{REWRITING}/report.py",
        "return others * leaf_bytes // axes.num_workers",
        "return others * leaf_bytes",
        "test_bytes.py",
        "scattered",
    ),
)
