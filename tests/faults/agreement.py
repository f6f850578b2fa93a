"""Faults of the agreement of processes, and of keys that differ."""

from tests.faults import Fault

_EXCHANGE = "dynamiq_jax/_buckets/exchange.py"
_AGREEMENT = "dynamiq_jax/_buckets/agreement.py"
_THC = "dynamiq_jax/methods/_thc.py"
_UNITS = "tests/test_agreement.py"
_KEYS = ("tests/test_keys.py",)


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"{_UNITS}::test_{name}" for name in names)


FAULTS = (
    Fault(
        "known descriptions are exchanged again",
        _EXCHANGE,
        "if (processes, digest) in self._agreed:",
        "if (processes, text) in self._agreed:",
        _unit("each_description_is_exchanged_once"),
    ),
    Fault(
        "a description that differed is compared with older ones",
        _EXCHANGE,
        "            if others := {*digests.values()} - {digest}:\n"
        "                self._numbers[processes] += 1\n",
        "            if others := {*digests.values()} - {digest}:\n",
        _unit("descriptions_are_compared_in_their_order"),
    ),
    Fault(
        "a description that differed counts as known",
        _EXCHANGE,
        "            if others :=",
        "            self._agreed.add((processes, digest))\n            if others :=",
        _unit("a_call_after_a_difference_raises_again"),
    ),
    Fault(
        "all groups of processes share one count",
        _EXCHANGE,
        "self._numbers: collections.Counter[tuple[int, ...]] = collections.Counter()",
        "self._numbers: collections.Counter = type(\n"
        '            "One", (collections.Counter,), {"__getitem__": lambda s, k: s.total()}\n'
        "        )()",
        _unit("groups_of_processes_count_on_their_own"),
    ),
    Fault(
        "processes that do not come are not named",
        _EXCHANGE,
        "sorted({*processes} - {*digests})",
        "sorted({*digests} - {*processes})",
        _unit("those_who_do_not_come_are_named"),
    ),
    Fault(
        "late processes are not compared",
        _EXCHANGE,
        "with contextlib.suppress(jax.errors.JaxRuntimeError):",
        "with contextlib.suppress(KeyError):",
        _unit("those_who_do_not_come_are_named"),
    ),
    Fault(
        "a service that fails stops the run",
        _EXCHANGE,
        "except jax.errors.JaxRuntimeError as error:",
        "except KeyError as error:",
        _unit("a_service_that_fails_stops_no_run"),
    ),
    Fault(
        "fields that one process alone has are not compared",
        _EXCHANGE,
        "for each in descriptions.values() for field in each)",
        "for field in min(descriptions.values(), key=len))",
        _unit("an_error_names_every_field_once"),
    ),
    Fault(
        "fields of objects of different kinds are listed",
        _EXCHANGE,
        'if field.rpartition(".")[0] in differing:',
        'if field.rpartition(".")[0] in ():',
        _unit("an_error_names_every_field_once"),
    ),
    Fault(
        "the exchange of an earlier job is used",
        _AGREEMENT,
        "if _exchange is None or _exchange.client is not job.client:",
        "if _exchange is None:",
        _unit("a_new_job_has_a_new_exchange"),
    ),
    Fault(
        "an inspection compares",
        _AGREEMENT,
        "if job is None or recording.is_recording():",
        "if job is None:",
        _unit("nothing_is_compared_elsewhere"),
    ),
    Fault(
        "the check cannot be switched off",
        _AGREEMENT,
        "compat.job() if how.options.check_agreement else None",
        "compat.job()",
        _unit("nothing_is_compared_elsewhere"),
    ),
    Fault(
        "workers of vmap are taken for processes",
        _AGREEMENT,
        "    if not {*axes.names} <= {*mesh.manual_axes}:\n        return ()\n",
        "",
        _unit("workers_of_vmap_are_in_one_process"),
    ),
    Fault(
        "a part of the devices counts as all",
        _AGREEMENT,
        "if mesh.size == jax.device_count(",
        "if mesh.size <= jax.device_count(",
        _unit("nothing_is_compared_elsewhere"),
    ),
    Fault(
        "equal numbers of other types differ",
        _AGREEMENT,
        "isinstance(value, float) and value.is_integer()",
        "isinstance(value, str) and value.is_integer()",
        _unit("equal_configurations_are_described_alike"),
    ),
    Fault(
        "addresses of objects are compared",
        _AGREEMENT,
        'return re.sub(r" at 0x[0-9a-fA-F]+", "", text)',
        "return text",
        _unit("a_description_has_no_addresses_of_objects"),
    ),
    Fault(
        "an inspection leaves a step that was never compared",
        "dynamiq_jax/_inspection/step.py",
        "lowered = jitted.trace(*args, **kwargs).lower()",
        "jitted.trace(*args, **kwargs)\n            lowered = jitted.lower(*args, **kwargs)",
        _unit("a_step_is_compared_after_its_inspection"),
    ),
    Fault(
        "methods of leaves are not compared",
        _AGREEMENT,
        'found[f"method of {name}"] = _text(methods[number])',
        "pass",
        _unit("a_description_has_the_method_of_each_leaf"),
    ),
    Fault(
        "only the first key is looked at",
        _THC,
        "jnp.all(words == words[:1])",
        "jnp.all(words[:1] == words[:1])",
        _KEYS,
    ),
    Fault(
        "the last worker's key is not looked at",
        _THC,
        "jnp.all(words == words[:1])",
        "jnp.all(words[:-1] == words[:1])",
        ("tests/test_keys.py::test_one_key_that_differs_is_enough",),
    ),
    Fault(
        "the hash of the key is no part of the report",
        _THC,
        "call.axis.owners_bytes(norms + _KEY_BYTES, norms)",
        "call.axis.owners_bytes(norms, norms)",
        ("tests/test_wire_report.py", "tests/test_methods.py"),
    ),
)
