"""Laws of the product that its tests show for its own methods, here for those of research.

Each test calls one of the product. `make test-slow` runs the conformance tests on `rows.RESEARCH`.
"""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS, ErrorFeedback, resolve_method
from dynamiq_jax.methods._registry import WRAPPERS
from dynamiq_research import (
    EF21M,
    THC,
    ARCTopK,
    EntropyCoded,
    FlashCommunication,
    GlobalCompensation,
    Marsit,
    OmniReduce,
    PowerSGD,
    SplitSketch,
    TopKChunked,
)
from research.tests.rows import RESEARCH
from tests.api import (
    test_foreign_states,
    test_largest_sums,
    test_optimizer,
    test_schedule,
    test_settings,
)
from tests.buckets import (
    test_error_estimate,
    test_error_limits,
    test_errors,
    test_policy,
    test_shards,
    test_sizes,
)
from tests.conformance import test_wire_cost
from tests.methods import test_error_feedback

# -------------------------------------------------------------------------------------------- names


def test_every_method_has_a_row():
    assert {*METHODS.installed} <= {*RESEARCH}


@pytest.mark.parametrize("name", METHODS.installed)
def test_names_are_lower_case_and_name_the_class_and_its_file(name):
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert name.replace("_", "") == METHODS[name].__name__.lower()
    *_, package, file = inspect.getmodule(METHODS[name]).__name__.split(".")
    assert name in (file, package)


@pytest.mark.parametrize(
    ("text", "method"),
    (
        ("flash_communication:3:spikes=False", FlashCommunication(code_bits=3, spikes=False)),
        ("thc:6:block=1024:clamp=3.5", THC(code_bits=6, block=1024, clamp=3.5)),
        ("thc:clamp=None", THC()),
        (
            "ef+arc_top_k:1:inner=exact",
            ErrorFeedback(inner=ARCTopK(bits=1.0, inner=dq.methods.Exact())),
        ),
        ("topk_chunked:2:block_size=512", TopKChunked(bits=2.0, block_size=512)),
        ("topk_chunked:inner=exact", TopKChunked(inner=dq.methods.Exact())),
        ("ef+topk_chunked:2", ErrorFeedback(inner=TopKChunked(bits=2.0))),
        ("ef21m+thc", EF21M(inner=THC())),
        ("gc+marsit", GlobalCompensation(inner=Marsit())),
    ),
)
def test_options_after_a_name_change_its_fields(text, method):
    assert resolve_method(text) == method


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("powersgd:4", r"'4' is not an option of powersgd\. Give FIELD=VALUE with .*'rank'\]\.$"),
        ("topk_chunked:inner=3", r"inner=3 cannot sum blocks"),
        ("topk_chunked:inner=bf17", r"method='bf17' is not known"),
    ),
)
def test_errors_quote_the_text_and_say_what_to_give(text, says):
    with pytest.raises(ValueError, match=rf"^method={re.escape(repr(text))}:? .*{says}"):
        resolve_method(text)


def test_an_error_of_a_wrapper_quotes_the_text():
    with pytest.raises(ValueError, match=r"^method='ef21m\+bf16': .*inner=BF16\(\) rounds"):
        resolve_method("ef21m+bf16")


def test_wrappers_are_installed():
    assert {*WRAPPERS.installed} == {"ef21m", "gc"}


# ------------------------------------------------------------------------------------------- states


STATEFUL = (
    SplitSketch(),
    EF21M(inner=dq.methods.Exact()),
    GlobalCompensation(inner=Marsit()),
    ErrorFeedback(inner=OmniReduce()),
    ErrorFeedback(inner=TopKChunked()),
    PowerSGD(),
)
by_class = {"ids": lambda method: type(method).__name__}


@pytest.mark.parametrize("method", STATEFUL, **by_class)
def test_states_of_all_workers_lie_side_by_side(data_mesh, method):
    test_optimizer.test_states_of_all_workers_lie_side_by_side(data_mesh, method, True)


def test_every_method_with_a_state_is_among_those():
    stateful = {name for name in METHODS.installed if resolve_method(name).is_stateful}
    assert stateful == {"powersgd", "split_sketch"}


def test_names_of_states_are_the_same_in_every_process():
    test_optimizer.test_names_of_states_are_the_same_in_every_process(
        "ef+powersgd:rank=2", "ErrorFeedback_PowerSGD_rank_2", ("55e9864c4896", "482a001a57a4")
    )


@pytest.mark.parametrize(
    "method",
    (
        SplitSketch(),
        EF21M(inner=dq.methods.Exact()),
        GlobalCompensation(inner=dq.methods.BF16()),
        ErrorFeedback(inner=TopKChunked()),
        PowerSGD(),
    ),
    **by_class,
)
def test_states_belong_to_their_workers(method):
    run = test_foreign_states.Run(method)
    test_foreign_states.test_workers_go_on_from_their_own_states_or_all_from_first_ones(run)
    test_foreign_states.test_states_matter(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    (
        "ef+marsit",
        "gc+marsit",
        "ef+split_sketch:4",
        "ef+topk_chunked:8",
        "ef+entropy_coded:coder=patched",
        "ef21m+thc:block=256",
        "ef21m+arc_top_k:8:inner=exact",
    ),
)
def test_states_resume_on_shards(method):
    test_shards.test_states_of_every_kind_resume_on_shards(method)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    (
        ("ef+bf16", "gc+bf16", ("'GlobalCompensation-", "the kinds differ")),
        ("split_sketch", "split_sketch:group=32", ("the kinds differ",)),
        ("ef+bf16", "powersgd:rank=2", ("'PowerSGD_rank_2-", "the kinds differ")),
        ("powersgd:rank=2", "powersgd:rank=3", ("'PowerSGD_rank_3-", "the kinds differ")),
    ),
)
def test_a_state_of_another_policy(before, after, words):
    test_errors.test_a_state_of_another_policy(before, after, words)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.installed)
def test_a_method_works_beside_another_one_and_after_a_warm_up(name, data_mesh):
    test_policy.test_every_method_works_beside_another_one(name)
    test_schedule.test_warm_up_is_exact_and_then_every_method_takes_over(data_mesh, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.installed)
def test_the_state_is_a_plain_pytree_that_keeps_its_shape(name):
    if not resolve_method(name).is_stateful:
        test_optimizer.test_the_state_is_a_plain_pytree_that_keeps_its_shape(name)


# ------------------------------------------------------------------------------- values and errors


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.installed)
def test_the_error_is_estimated(name):
    # Of blocks that a sample rarely meets.
    blocks = ("arc_top_k", "omnireduce", "split_sketch", "topk_chunked")
    test_error_estimate.test_the_error_of_every_method_is_estimated(
        name, 1.5 if name in blocks else 0.4
    )


@pytest.mark.parametrize("method", ("thc", "marsit"))
def test_a_result_that_underflows_has_its_error(method):
    test_error_limits.test_a_result_that_underflows_has_its_error(method, 1e-37, True)


def test_a_limit_keeps_means_finite_that_are_finite():
    test_error_limits.test_a_limit_keeps_means_finite_that_are_finite("thc", 1e38)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS.installed)
def test_sums_up_to_the_limit_are_finite_and_above_it_not(name):
    test_largest_sums.test_sums_up_to_the_limit_are_finite_and_above_it_not(name)


def test_error_feedback_keeps_what_is_not_applied(monkeypatch):
    law = test_error_feedback.test_what_is_applied_and_what_is_kept_make_up_what_came_in
    for name, case in {
        "thc": (THC(), (1e-3, 0.05), 1e-10),
        "powersgd": (PowerSGD(rank=4), (0.05, 1.0), 1e-10),
        "powersgd in bf16": (PowerSGD(rank=4, inner=dq.methods.BF16()), (0.05, 1.0), 1e-4),
    }.items():
        monkeypatch.setitem(test_error_feedback.INNER, name, case)
        law(name)


@pytest.mark.parametrize("method", (TopKChunked(inner=THC()), PowerSGD(inner=THC())), **by_class)
def test_two_kinds_of_statistics_and_two_messages_with_some_are_counted(method, monkeypatch):
    monkeypatch.setitem(test_wire_cost.TRACED, "method", method)
    test_wire_cost.test_the_wire_cost_counts_all_bytes_of_an_all_reduce("method")


# --------------------------------------------------------------------------------- settings of JAX


def test_64_bits_change_nothing(data_mesh):
    test_settings.test_every_topology("entropy_coded", "all_to_all", True, data_mesh)
    test_settings.test_sums_with_metrics_and_a_limit(EntropyCoded(), False, data_mesh)
    for method in ("thc", "powersgd"):
        test_settings.test_internal_checks_of_jax_pass(method, data_mesh)


LARGEST = ("arc_top_k", "entropy_coded", "flash_communication", "marsit", "omnireduce", "rand_k")
LARGEST += ("split_sketch:16:hot=0:rows=1", "thc", "top_k", "topk_chunked")


@pytest.mark.slow
@pytest.mark.parametrize("method", LARGEST)
@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_the_largest_bucket_has_no_index_beyond_32_bits(data_mesh, method, topology):
    test_sizes.test_the_largest_bucket_has_no_index_beyond_32_bits(data_mesh, method, topology)


# -------------------------------------------------------------------------------------- metrics


def test_a_metric_of_a_tree_without_compressed_leaves_is_zero():
    tiny = dq.all_reduce_gradients("data", method="omnireduce")
    _, state = jax.vmap(lambda g: tiny.update(g, tiny.init(g)), axis_name="data")(jnp.ones((2, 8)))
    assert state.metrics["left_out"].tolist() == [0, 0]


def test_fields_are_frozen():
    for name in METHODS.installed:
        method = resolve_method(name)
        assert method == METHODS[name]() and hash(method) == hash(METHODS[name]())
        assert all(field.kw_only for field in dataclasses.fields(method))
