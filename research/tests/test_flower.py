"""Local SGD through Flower: laws of a round of its server, and of replies that are left out."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dynamiq_jax as dq
from dynamiq_jax import islands
from dynamiq_jax.islands import messages
from dynamiq_research import flower_arrays, flower_reference, flower_reply, flower_strategy
from tests.support.gradients import heavy_tailed
from tests.trainers.recipe import run_lines

pytest.importorskip("flwr", reason="make test-trainers installs Flower")
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

PARAMS = {"layers": [{"kernel": heavy_tailed(0, (40, 32))}], "bias": heavy_tailed(1, (7,))}
FIELDS = {"fraction_evaluate": 0.0, "min_available_nodes": 1, "min_train_nodes": 1}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def moved(params, seed):
    """Parameters after local steps: others for each seed."""
    leaves, structure = jax.tree.flatten(params)
    changed = [leaf + heavy_tailed(10 * seed + i + 2, leaf.shape) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, changed)


def call(arrays, node):
    """The message with which a server calls a node."""
    record = RecordDict({"arrays": arrays, "config": ConfigRecord()})
    return Message(record, metadata=Metadata(1, "", 0, node, "", "", 0.0, 1e9, "train"))


def reply(arrays, node, examples=1.0, method="dynamiq:4"):
    """The answer of a node that has moved by its number."""
    message = call(arrays, node)
    params = moved(flower_reference(message, PARAMS), node)
    metrics = {"num-examples": examples, "loss": float(node)}
    return flower_reply(message, params, metrics=metrics, key=jax.random.key(node), method=method)


class Nodes(Grid):
    """Clients in this process: those that are connected, in each round."""

    def __init__(self, rounds, answer):
        self.rounds, self.answer, self.called = iter(rounds), answer, []

    def get_node_ids(self):
        self.called.append(next(self.rounds))
        return self.called[-1]

    def send_and_receive(self, messages, *, timeout=None):
        return [self.answer(message) for message in messages]

    run = set_run = create_message = push_messages = pull_messages = None


@pytest.fixture(autouse=True)
def identity():
    """That of a server, which Flower gives to each of its processes."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


def server(arrays, outer=OUTER):
    """A strategy that has called a node."""
    strategy = flower_strategy(outer, **FIELDS)
    strategy.configure_train(1, arrays, ConfigRecord(), Nodes([[1], [1]], None))
    return strategy


def as_arrays(record):
    return {name: array.numpy() for name, array in record.items()}


def sent(answer):
    return islands.messages.Message.from_bytes(answer.content["change"]["change"].data)


@pytest.mark.parametrize("method", ("dynamiq:4", "mxfp4"))
def test_a_round_is_the_weighted_mean_of_the_decoded_changes(method):
    """Bit for bit, decoded with NumPy alone, whatever the order in which they came."""
    arrays = flower_arrays(PARAMS)
    examples = (10.0, 20.0, 70.0)
    replies = [reply(arrays, node, n, method) for node, n in enumerate(examples, start=1)]
    shares = [n / sum(examples) for n in examples]
    mean = messages.decode(*map(sent, replies), weights=shares)
    before = as_arrays(arrays)
    for order in itertools.permutations(replies):
        after, metrics = server(arrays, optax.sgd(1.0)).aggregate_train(1, order)
        for name, values in as_arrays(after).items():
            np.testing.assert_array_equal(values, before[name] - mean[name])
            assert np.any(values != before[name])
        assert metrics["loss"] == pytest.approx(0.1 * 1 + 0.2 * 2 + 0.7 * 3)


def test_a_reply_has_the_bytes_of_its_message():
    arrays = flower_arrays(PARAMS)
    answer = reply(arrays, 1)
    data = answer.content["change"]["change"].data
    assert len(data) == sent(answer).nbytes < 0.35 * sum(a.numpy().nbytes for a in arrays.values())


DAMAGES = ("altered", "cut", "error", "weight", "reference", "leaves", "nan", "inf", "absurd")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_reply_that_is_damaged_is_left_out(damage, caplog):
    arrays = flower_arrays(PARAMS)
    good, bad = reply(arrays, 1), reply(arrays, 2)
    known, _ = server(arrays).aggregate_train(1, [good])
    both, _ = server(arrays).aggregate_train(1, [good, reply(arrays, 2)])
    content = bad.content
    data = content["change"]["change"].data
    if damage == "altered":
        _put(content, data[:200] + bytes([data[200] ^ 1]) + data[201:])
    elif damage == "cut":
        _put(content, data[:-1])
    elif damage == "error":
        bad = Message(Error(1, "the client died"), metadata=bad.metadata)
    elif damage == "weight":
        content["metrics"]["num-examples"] = float("nan")
    elif damage == "reference":
        content = reply(flower_arrays(moved(PARAMS, 5)), 2).content
        bad = Message(content, metadata=bad.metadata)
    elif damage == "leaves":
        other = {"w": heavy_tailed(0, (8, 8))}
        _put(content, islands.encode(other, key=jax.random.key(0)).to_bytes())
    else:
        value = {"nan": np.nan, "inf": np.inf, "absurd": 1e30}[damage]
        other = {**PARAMS, "bias": np.full(7, value, np.float32)}
        _put(content, islands.encode(other, key=jax.random.key(0)).to_bytes())
    found, _ = server(arrays).aggregate_train(1, [good, bad])
    for name, values in as_arrays(found).items():
        np.testing.assert_array_equal(values, as_arrays(known)[name])
        assert np.any(values != as_arrays(both)[name])
    if damage != "absurd":  # which has nothing to be compared with, alone
        assert server(arrays).aggregate_train(1, [bad]) == (None, None)
    assert "The change of node 2 is left out: " in caplog.text


def _put(content, data):
    array = Array("uint8", (len(data),), "dynamiq_jax.Message", data)
    content["change"] = ArrayRecord({"change": array})


def test_clients_leave_and_come_back():
    """In three rounds of `strategy.start`: the outer optimizer keeps its momentum over them."""
    rounds = ([1, 2, 3], [1, 3], [1, 2, 3])
    app = ClientApp()

    @app.train()
    def train(message, context):
        node = message.metadata.dst_node_id
        return reply(message.content["arrays"], node, float(node), "bf16")

    # A strategy looks at the nodes twice: for their number, and to draw some of them.
    nodes = Nodes([members for members in rounds for _ in range(2)], lambda m: app(m, None))
    strategy = flower_strategy(OUTER, **FIELDS)
    found = strategy.start(nodes, flower_arrays(PARAMS), num_rounds=3).arrays
    assert nodes.called[::2] == list(rounds)
    reference, state = PARAMS, OUTER.init(PARAMS)
    for members in rounds:
        changes = [
            jax.tree.map(jnp.subtract, reference, moved(reference, node)) for node in members
        ]
        shares = [node / sum(members) for node in members]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *changes)
        mean = jax.tree.map(functools.partial(jnp.tensordot, jnp.asarray(shares), axes=1), stacked)
        updates, state = OUTER.update(mean, state)
        reference = optax.apply_updates(reference, updates)
    known = as_arrays(flower_arrays(reference))
    error = dq.vnmse(as_arrays(found), known)
    assert 0 < error < 1e-4  # changes in BF16


def test_the_lines_of_the_page_run():
    """Its clients stay where they are: all rounds send changes of zero."""
    names = {"params": PARAMS, "batches": lambda context: [], "key": jax.random.key(0)}
    run_lines("../research/flower.md", "", names)
    answers = []

    def answer(message):
        answers.append(names["app"](message, None))
        return answers[-1]

    nodes = Nodes([[1, 2]] * 40, answer)
    names["main"](nodes, None)
    assert len(answers) == 2 * 20
    decoded = [messages.decode(sent(reply)) for reply in answers]
    assert not any(np.any(leaf) for tree in decoded for leaf in tree.values())


def test_parameters_that_are_not_possible_are_refused():
    with pytest.raises(TypeError, match="has dtype bfloat16"):
        flower_arrays({"w": jnp.ones(3, jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"outer=0\.7 is not an optax"):
        flower_strategy(0.7)
    message = call(flower_arrays(PARAMS), 1)
    for other in ({"v": np.zeros(3, np.float32)}, {**PARAMS, "bias": np.zeros(8, np.float32)}):
        with pytest.raises(ValueError, match="Give the model of the server"):
            flower_reference(message, other)
    assert isinstance(flower_strategy(), FedAvg)
