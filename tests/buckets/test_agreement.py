"""Processes that do not run the same collective all get one error; those that do pay nothing."""

import contextlib
import functools
import re
import threading
import time
import types
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._check import agreement, disagreement, exchange
from pallas_kernels import operations
from pallas_kernels._jax import compat
from pallas_kernels._native.build import SWITCH
from tests.support import processes
from tests.support.agreement_worker import DISAGREEING, outcomes
from tests.support.islands import together
from tests.support.workers import mesh_of


def test_processes_of_a_job_run_what_is_the_same_and_hear_of_what_is_not():
    found = processes.run(outcomes, [()] * 2)
    (error,) = {of_process["another"]["error"] for of_process in found}  # the same on all
    assert "  method: MXFP4 in process 0; MXFP8 in process 1\n" in error
    for of_process in found:
        for name in ("the same", "corrected"):  # a call after a difference is compared anew
            assert of_process[name] == {"error": None, "warnings": []}
        assert of_process["is free"]
        assert of_process["exchanges"] == 1  # of all steps, and of another jit


class Client:
    """A coordination service for threads: a key is written once, unless it says otherwise."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.calls = 0

    @contextlib.contextmanager
    def _values(self):
        with self.changed:
            self.calls += 1
            yield self.values

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._values() as values:
            if not allow_overwrite and key in values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, prefix):
        assert prefix.endswith("/")
        with self._values() as values:
            return [pair for pair in values.items() if pair[0].startswith(prefix)]

    def key_value_delete(self, key):
        with self._values() as values:
            for found in [*values]:
                if found == key or (key.endswith("/") and found.startswith(key)):
                    del values[found]

    def blocking_key_value_get(self, key, milliseconds):
        with self._values() as values:
            if not self.changed.wait_for(lambda: key in values, milliseconds / 1e3):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return values[key]


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


@contextlib.contextmanager
def silent():
    """Make an error of any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def agree(exchanges, descriptions, group=None, **how):
    """Run one comparison in a thread for each process: errors, None where there is none."""
    group = tuple(range(len(exchanges))) if group is None else group

    def run(one, description):
        try:
            return one.agree(description, group, **how)
        except RuntimeError as error:
            return str(error)

    pairs = zip(exchanges, descriptions, strict=True)
    return together([functools.partial(run, *pair) for pair in pairs])


def exchanges_of(number: int) -> list[exchange.Exchange]:
    client = Client()
    return [exchange.Exchange(client, rank) for rank in range(number)]


@pytest.fixture
def short(monkeypatch):
    """Waits that last no longer than threads may need to start."""
    monkeypatch.setattr(exchange, "PATIENCE", 0.3)
    monkeypatch.setattr(exchange, "SHORT_PATIENCE", 0.2)
    monkeypatch.setattr(exchange, "DOUBT", 0.3)
    monkeypatch.setattr(exchange, "_GLANCE", 0.1)


def test_each_description_is_exchanged_once(monkeypatch):
    monkeypatch.setattr(exchange, "_GLANCE", 60.0)  # threads start within it
    all_of_them = exchanges_of(3)
    client = all_of_them[0].client
    assert agree(all_of_them, [{"a": "1"}] * 3) == [None] * 3
    calls = client.calls - 3  # each process begins with one
    assert calls == 4 * 3
    assert agree(all_of_them, [{"a": "1"}] * 3) == [None] * 3
    assert client.calls == calls + 3
    assert agree(all_of_them, [{"a": "2"}] * 3) == [None] * 3
    assert client.calls == 2 * calls + 3


def test_all_that_wait_with_others_hear_of_it(short):
    all_of_them = exchanges_of(2)
    first, second = agree(all_of_them, [{"step": "a"}, {"step": "b"}])
    assert first == second and "step: a in process 0; b in process 1" in first
    assert "Nothing was sent." in first
    first, _ = agree(all_of_them, [{"step": "b"}, {"step": "a"}])  # not with those before
    assert "step: b in process 0; a in process 1" in first
    assert agree(all_of_them, [{"step": "a"}] * 2) == [None] * 2  # what differed is forgotten


def test_threads_of_processes_may_trace_in_any_order(monkeypatch):
    monkeypatch.setattr(exchange, "PATIENCE", 60.0)
    both = exchanges_of(2)
    first, second = {"step": "a"}, {"step": "b"}
    assert agree(both * 2, [first, second, second, first], (0, 1)) == [None] * 4


def test_groups_of_processes_count_on_their_own(short):
    all_of_them = exchanges_of(3)
    pair = all_of_them[1:]
    assert agree(pair, [{"a": "1"}, {"a": "1"}], (1, 2)) == [None] * 2
    assert agree(all_of_them, [{"a": "1"}] * 3) == [None] * 3
    first, second = agree(pair, [{"a": "2"}, {"a": "3"}], (1, 2))
    assert first == second and "a: 2 in process 1; 3 in process 2" in first


def test_an_error_names_every_field_once():
    def difference(*processes):
        described = {}
        for process, (method, bits, leaves) in enumerate(processes):
            described[process] = {"method": method, "method.bits": bits, "same": "x"}
            described[process] |= {f"leaf {n}": leaf for n, leaf in enumerate(leaves)}
        return disagreement.difference(described)

    text = difference(("A", "4", "wb"), ("A", "5", "wb"), ("A", "4", "w"))
    assert "method.bits: 4 in processes 0, 2; 5 in process 1\n" in text
    assert "leaf 1: b in processes 0-1; nothing in process 2\n" in text
    assert "same" not in text.replace("the same", "") and "leaf 0" not in text
    other = difference(("A", "4", ""), ("B", "5", ""))
    assert "method: A" in other and "method.bits" not in other
    many = difference(("A", "4", ""), ("A", "4", "x" * 99))
    assert "and 89 more" in many and len(many.splitlines()) == 13
    few = difference(("A", "4", ""), ("A", "4", "x" * 10))
    assert "more" not in few and len(few.splitlines()) == 12


def test_a_service_that_fails_stops_no_run():
    one, _ = exchanges_of(2)

    def fails(*args):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: gone")

    one.client.key_value_dir_get = fails
    with pytest.warns(UserWarning, match="UNAVAILABLE: gone.*not checked"):
        one.agree({"a": "1"}, (0, 1))


def on_mesh(size: int, method="mxfp8", names=("w",)):
    mesh = mesh_of(data=size)

    def local():
        leaf = jnp.zeros((16, 256)) + jax.lax.axis_index("data").astype(jnp.float32)
        return dq.pmean(dict.fromkeys(names, leaf), "data", method, key=jax.random.key(0))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    return jax.jit(mapped)


@pytest.fixture
def described(monkeypatch) -> list[tuple[dict, tuple[int, ...]]]:
    """What this process would send as one of two."""
    sent = []
    monkeypatch.setattr(compat, "job", lambda: compat.DistributedProcess(object(), 0, 2))

    def record(self, *arguments, only_traces):
        sent.append(arguments)

    monkeypatch.setattr(exchange.Exchange, "agree", record)
    return sent


def test_a_mesh_of_all_devices_has_all_processes(described):
    on_mesh(jax.device_count()).lower()
    ((description, group),) = described
    assert group == (0, 1)
    assert description["axes"] == str({"data": jax.device_count()})
    assert description["version of the wire format"] == "1"


def test_a_mesh_of_some_devices_has_their_processes(described, monkeypatch):
    devices = np.array([types.SimpleNamespace(process_index=process) for process in (5, 0)])
    mesh = types.SimpleNamespace(shape={"data": 2}, devices=devices)
    monkeypatch.setattr(compat, "concrete_mesh", lambda: mesh)
    on_mesh(2).trace()
    ((_, group),) = described
    assert group == (0, 5)


@pytest.mark.parametrize("name", DISAGREEING)
def test_an_error_says_what_differs_and_nothing_else(described, name):
    one, others, (field, of_one, of_others) = DISAGREEING[name]
    sent = {}
    for process, trace in enumerate((others, one)):
        described.clear()
        trace(name)
        sent[process], _ = described[0]
    error = disagreement.difference(sent)
    assert f"  {field}: {of_others} in process 0; {of_one} in process 1\n" in error
    assert len(error.splitlines()) == (4 if name == "more leaves" else 3)


def test_nothing_is_compared_elsewhere(described):
    """Who else is on a mesh of some devices is not known. Workers of vmap are in one process, also
    beside a mesh of all devices, as under `jax.set_mesh`.
    """
    on_mesh(2).lower()
    on_mesh(jax.device_count(), method=dq.Compression(check_agreement=False)).lower()
    local = functools.partial(dq.pmean, axis_name="data", method="bf16", key=jax.random.key(0))
    on_workers = jax.vmap(local, axis_name="data")
    mesh = mesh_of(other=jax.device_count())
    how = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "check_vma": False}
    for mapped in (on_workers, jax.shard_map(on_workers, **how)):
        jax.jit(mapped).lower(jnp.ones((2, 4096)))
    dq.inspect(on_mesh(jax.device_count()))
    assert not described


def test_a_step_is_compared_after_its_inspection(described):
    step = on_mesh(jax.device_count())
    dq.inspect(step)
    assert not described
    step.lower()
    assert described


def test_a_description_has_the_method_of_each_leaf(described):
    rules = {"a": "mxfp8", "b": "uncompressed"}
    on_mesh(jax.device_count(), method=rules, names="ab").lower()
    ((description, _),) = described
    assert "MXFP8" in description["method of tree['a']"]
    assert description["method of tree['b']"] == "uncompressed"


def test_equal_configurations_are_described_alike(described):
    for method in (dq.DynamiQ(bits=4), dq.DynamiQ(bits=4.0), "dynamiq:4"):
        on_mesh(jax.device_count(), method=method).lower()
    (first, _), *others = described
    assert all(description == first for description, _ in others)


def test_processes_of_which_one_refuses_kernels_get_an_error(described, monkeypatch):
    for refused in ((), ("triton",)):
        monkeypatch.setattr(operations, "refused_backends", lambda refused=refused: refused)
        on_mesh(jax.device_count()).lower()
    error = disagreement.difference({n: sent for n, (sent, _) in enumerate(described)})
    assert "  refused kernels: () in process 0; ('triton',) in process 1\n" in error


def test_processes_may_differ_in_the_native_codec_which_has_the_bits_of_the_base(
    described, monkeypatch
):
    for switch in "10":
        monkeypatch.setenv(SWITCH, switch)
        on_mesh(jax.device_count()).lower()
    (first, _), (second, _) = described
    assert first == second


def test_a_description_has_no_addresses_of_objects():
    class Thing:
        pass

    assert not re.search("0x", agreement._text([Thing(), Thing]))
    assert "Thing" in agreement._text([Thing(), Thing])


def test_a_call_runs_what_it_traces_and_lowering_does_not():
    found = []

    def traced(x):
        found.append(compat.only_traces())
        return x + 1

    def called_within(x):
        jax.eval_shape(traced, x)
        return jax.jit(traced)(x)

    x = jnp.ones(3)
    mesh = mesh_of(data=1)
    mapped = jax.shard_map(traced, mesh=mesh, in_specs=P(), out_specs=P())
    for call in (traced, jax.jit(called_within), jax.grad(lambda x: traced(x).sum()), mapped):
        call(x)
    assert found and not any(found)
    found.clear()
    jax.jit(called_within).lower(x)
    jax.eval_shape(jax.jit(traced), x)
    jax.make_jaxpr(traced)(x)
    jax.jit(mapped).trace(x)
    assert found and all(found)


def test_a_new_job_has_a_new_exchange():
    first, second = (compat.DistributedProcess(object(), 0, 2) for _ in range(2))
    assert agreement.exchange_of(first) is agreement.exchange_of(first)
    one = agreement.exchange_of(first)
    assert agreement.exchange_of(second) is not one


def test_threads_of_a_process_have_one_exchange(monkeypatch):
    class Slow(exchange.Exchange):
        def __init__(self, *args):
            time.sleep(0.2)
            super().__init__(*args)

    monkeypatch.setattr(agreement, "Exchange", Slow)
    job = compat.DistributedProcess(object(), 0, 2)
    found = together([functools.partial(agreement.exchange_of, job)] * 4)
    assert len(found) == 4 and len({*map(id, found)}) == 1


def test_those_who_do_not_come_are_named(short):
    all_of_them = exchanges_of(4)
    with pytest.warns(UserWarning, match="processes 1-3 had not traced the same step.*axes: 4;"):
        all_of_them[0].agree({"axes": "4", "method": "a"}, (0, 1, 2, 3))
    with silent():
        calls = all_of_them[0].client.calls
        all_of_them[0].agree({"axes": "4", "method": "a"}, (0, 1, 2, 3))
        assert all_of_them[0].client.calls == calls  # known: it does not wait again


@pytest.fixture
def pair(short) -> list[exchange.Exchange]:
    return exchanges_of(2)


def trace_alone(one: exchange.Exchange, description: dict[str, str], **how) -> None:
    with pytest.warns(UserWarning, match="had not traced the same step"):
        one.agree(description, (0, 1), **how)


def test_a_process_that_traces_alone_leaves_nothing_behind(pair):
    trace_alone(pair[0], {"a": "for a log"})
    for step in "xyz":
        assert agree(pair, [{"a": step}] * 2) == [None] * 2
    # The other process may trace it later, and finds it answered.
    with silent():
        pair[1].agree({"a": "for a log"}, (0, 1))
    first, second = agree(pair, [{"a": "p"}, {"a": "q"}])
    assert first == second and "a: p in process 0; q in process 1" in first


def test_a_process_that_traces_alone_again_waits_shorter(pair, monkeypatch):
    waits = []
    wait = Client.blocking_key_value_get

    def record(self, key, milliseconds):
        waits.append(milliseconds)
        return wait(self, key, milliseconds)

    monkeypatch.setattr(Client, "blocking_key_value_get", record)
    for name in "ab":
        trace_alone(pair[0], {"a": name})
    assert sum(waits[:2]) == pytest.approx(1000 * exchange.PATIENCE, abs=1)
    assert sum(waits[2:]) == pytest.approx(1000 * exchange.SHORT_PATIENCE, abs=1)
    assert agree(pair, [{"a": "c"}] * 2) == [None] * 2
    waits.clear()
    trace_alone(pair[0], {"a": "d"})  # after an agreement it may be a step of all again
    assert sum(waits) == pytest.approx(1000 * exchange.PATIENCE, abs=1)


def test_a_late_process_that_differs_is_the_one_that_raises(pair):
    """Those who went on may be stuck; if they trace again, they raise the same."""
    trace_alone(pair[0], {"a": "1"})
    with pytest.raises(RuntimeError, match="a: 1 in process 0; 2 in process 1") as late:
        pair[1].agree({"a": "2"}, (0, 1))
    assert "Some went on" in str(late.value)
    with pytest.raises(RuntimeError) as early:
        pair[0].agree({"a": "3"}, (0, 1))
    assert str(early.value) == str(late.value)
    assert agree(pair, [{"a": "3"}] * 2) == [None] * 2


def test_a_late_process_waits_for_one_that_went_on_elsewhere(pair, monkeypatch):
    """It traced for a log alone, and comes with some delay."""
    monkeypatch.setattr(exchange, "DOUBT", 60.0)
    trace_alone(pair[0], {"a": "for a log"})
    results = []
    thread = in_thread(lambda: results.append(pair[1].agree({"a": "1"}, (0, 1))))
    time.sleep(2 * exchange.PATIENCE)
    assert thread.is_alive() and not results
    pair[0].agree({"a": "1"}, (0, 1))
    thread.join(60)
    assert results == [None]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_process_may_lower_a_step_while_others_wait_with_another(pair, monkeypatch, earlier):
    """It comes when it has lowered it, whether the others have gone on by then or not."""
    monkeypatch.setattr(exchange, "DOUBT", 60.0)
    results = []

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may have gone on
            pair[1].agree({"a": "1"}, (0, 1))
        results.append(None)

    thread = in_thread(run)
    time.sleep(2 * exchange.PATIENCE if earlier else 0.1)
    assert bool(results) == earlier
    trace_alone(pair[0], {"a": "for a log"}, only_traces=True)
    with silent():
        pair[0].agree({"a": "1"}, (0, 1))
    thread.join(60)
    assert results == [None]


def test_a_process_that_runs_what_it_lowered_alone_is_missed(pair):
    trace_alone(pair[0], {"a": "1"}, only_traces=True)
    with pytest.raises(RuntimeError, match="a: 1 in process 0; 2 in process 1"):
        pair[1].agree({"a": "2"}, (0, 1))


def test_processes_that_all_lower_programs_that_differ_hear_of_it(pair):
    first, second = agree(pair, [{"a": "1"}, {"a": "2"}], only_traces=True)
    assert first == second and "a: 1 in process 0; 2 in process 1" in first
    trace_alone(pair[0], {"a": "3"}, only_traces=True)
    with pytest.raises(RuntimeError, match="a: 3 in process 0; 4 in process 1"):
        pair[1].agree({"a": "4"}, (0, 1), only_traces=True)


def test_what_a_process_went_on_with_does_not_count_for_ever(pair, monkeypatch):
    trace_alone(pair[0], {"a": "for a log"})
    monkeypatch.setattr(exchange, "_HELD", 0.0)
    trace_alone(pair[1], {"a": "for another log"})


def test_processes_that_cannot_come_are_not_waited_for(monkeypatch):
    """All threads wait: no time can change what they trace."""
    monkeypatch.setattr(exchange, "PATIENCE", 1e6)
    monkeypatch.setattr(exchange, "_is_only_thread", lambda: True)
    all_of_them = exchanges_of(3)
    first, *others = agree(all_of_them, [{"a": "1"}, {"a": "2"}, {"a": "1"}])
    assert others == [first, first] and "a: 1 in processes 0, 2; 2 in process 1" in first


def test_a_process_that_starts_again_is_not_held_to_its_past(pair):
    trace_alone(pair[0], {"a": "before"})
    again = exchange.Exchange(pair[0].client, 0)
    assert agree([again, pair[1]], [{"a": "after"}] * 2) == [None] * 2
    assert agree([again, pair[1]], [{"a": "before"}] * 2) == [None] * 2


def test_agreement_that_cannot_be_checked_is_said_once(monkeypatch):
    """Where a version of JAX has its private names elsewhere."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def no_module(name):
        raise ImportError(f"no module {name}")

    moved = (
        no_module,
        lambda name: object(),
        lambda name: types.SimpleNamespace(
            global_state=types.SimpleNamespace(client=object(), process_id=0, num_processes=2)
        ),
    )
    for module in moved:
        compat._warn_that_nothing_is_compared.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(compat.importlib, "import_module", module)
            for look, name in ((compat.job, "service"), (compat.concrete_mesh, "mesh of")):
                with pytest.warns(UserWarning, match=f"The .*{name}.* not found.*agreement=False"):
                    assert look() is None
                with silent():
                    assert look() is None
    compat._warn_that_nothing_is_compared.cache_clear()


def test_the_mesh_is_that_of_set_mesh(data_mesh):
    found = []
    assert compat.concrete_mesh() is None
    with jax.set_mesh(data_mesh(2)):
        assert compat.concrete_mesh() == data_mesh(2)
        assert jax.eval_shape(lambda: found.append(compat.concrete_mesh())) is None
    assert found == [data_mesh(2)]


def test_one_process_needs_no_coordination_service(monkeypatch):
    monkeypatch.setattr(compat.importlib, "import_module", lambda name: object())
    compat._warn_that_nothing_is_compared.cache_clear()
    with silent():
        assert compat.job() is None and compat.concrete_mesh() is None
        on_mesh(jax.device_count()).lower()
    compat._warn_that_nothing_is_compared.cache_clear()
