"""Local SGD through Flower: a server calls its clients, which answer with encoded changes."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import dynamiq_jax as dq
from dynamiq_jax.islands import decode, encode
from dynamiq_jax.islands.merging import examine, hash_of, leaves_of, take_outer_step, too_large
from dynamiq_jax.islands.messages import Message
from dynamiq_jax.methods import Method
from dynamiq_jax.parts import check_number
from dynamiq_jax.parts.collectives import check_optimizer

_ARRAYS, _CONFIG, _CHANGE, _METRICS = "arrays", "config", "change", "metrics"  # records
_HASH = "reference-hash"
_WARNING = 30  # level of a line in the log of a Flower server
_NORM_LIMIT = 1000.0  # as that of `Islands`
_DTYPES = ("float16", "float32")  # floating ones that NumPy and JAX have by default


class _Checked(NamedTuple):
    """Reply that is in order."""

    weight: float
    message: Message
    content: Any
    norm: float


def flower_strategy(
    outer: optax.GradientTransformation = optax.sgd(0.7, momentum=0.9, nesterov=True), **fields: Any
) -> Any:
    """Return a strategy of a Flower server that takes the outer steps of local SGD (DiLoCo).

    In each round, clients get the reference in full precision, and answer with `flower_reply`.
    The server decodes their messages, and takes their weighted mean (reference - parameters) as
    the gradient of an outer step. A reply that fails, is damaged, began at another reference, holds
    NaN or Inf, or has a norm above 1,000 times the median is logged and left out. The round goes on
    with the others.

    Args:
      outer: takes the mean change as a gradient, as that of `training.LocalSGD`. Its state is in
        the strategy: it starts again with the server.
      fields: those of `flwr.serverapp.strategy.FedAvg`, which this strategy extends, such as
        `min_train_nodes`. `weighted_by_key` names the metric that is the weight of a change.

    Raises:
      ImportError: Flower is not installed.
      TypeError: an outer optimizer that is none of optax.
    """
    check_optimizer("outer", outer, "optax.sgd(0.7, momentum=0.9, nesterov=True)")
    return _strategy_class()(outer, fields)


def flower_arrays(params: Any) -> Any:
    """Return parameters as the `initial_arrays` of `strategy.start`: a `flwr.app.ArrayRecord`.

    Args:
      params: pytree of float32 or float16 arrays.

    Raises:
      ImportError: Flower is not installed.
      TypeError: a leaf of another dtype.
    """
    arrays = dict(zip(_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))
    for name, array in arrays.items():
        if str(array.dtype) not in _DTYPES:
            raise TypeError(
                f"params[{name!r}] has dtype {array.dtype}. Give one of {_DTYPES}, and cast the "
                "reference on the clients."
            )
    return _flwr_app().ArrayRecord({name: _flwr_app().Array(a) for name, a in arrays.items()})


def flower_reference(message: Any, like: Any) -> Any:
    """Return the reference that a client has to train from.

    Args:
      message: the `flwr.app.Message` that calls the client.
      like: pytree of the structure and shapes of the parameters.

    Raises:
      ValueError: the server has parameters of other paths or shapes.
    """
    found = _arrays_of(message.content[_ARRAYS])
    wanted = dict(zip(_names(like), map(np.shape, jax.tree.leaves(like)), strict=True))
    shapes = {name: array.shape for name, array in found.items()}
    if shapes != wanted:
        raise ValueError(
            f"the server has parameters {shapes!r:.200}, and like has {wanted!r:.200}. Give the "
            "model of the server."
        )
    leaves = [jnp.asarray(found[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def flower_reply(
    message: Any,
    params: Any,
    *,
    metrics: Mapping[str, float],
    key: Array,
    method: Method | str = dq.DynamiQ(bits=4),
) -> Any:
    """Return the answer of a client after its local steps: its encoded change.

    Args:
      message: the `flwr.app.Message` that called the client.
      params: parameters after the local steps, which began at `flower_reference`.
      metrics: numbers, which the server averages. `"num-examples"` is the weight of the change, of
        steps or tokens, unless the strategy has another `weighted_by_key`.
      key: PRNG key of the rounding noise, another one for each client and round.
      method: of the change; see `dynamiq_jax.encode`.

    Raises:
      ValueError: a method that no message can hold.
    """
    app = _flwr_app()
    change = jax.tree.map(jnp.subtract, flower_reference(message, params), params)
    data = encode(change, key=key, method=method).to_bytes()
    # As it is: Flower sends arrays in parts, of any length.
    array = app.Array("uint8", (len(data),), "dynamiq_jax.Message", data)
    reference = hash_of(_arrays_of(message.content[_ARRAYS]))
    records = {
        _CHANGE: app.ArrayRecord({_CHANGE: array}),
        _METRICS: app.MetricRecord(dict(metrics)),
        _CONFIG: app.ConfigRecord({_HASH: reference}),
    }
    return app.Message(app.RecordDict(records), reply_to=message)


def _names(tree: Any) -> list[str]:
    """Return the paths of leaves, as messages have them."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def _node_of(reply: Any) -> int:
    node: int = reply.metadata.src_node_id
    return node


def _arrays_of(record: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in sorted(record.items())}


def _flwr_app() -> Any:
    try:
        import flwr.app
    except ImportError as error:
        raise ImportError(
            f"Flower is not installed ({error}): pip install 'flwr>=1.42'."
        ) from error
    return flwr.app


@functools.cache
def _strategy_class() -> Any:
    """Return the class of strategies; its base is that of Flower, which is imported when used."""
    _flwr_app()
    from flwr.common import log
    from flwr.serverapp.strategy import FedAvg

    class OuterStep(FedAvg):
        """Local SGD of clients that send encoded changes."""

        def __init__(self, outer: optax.GradientTransformation, fields: dict[str, Any]):
            super().__init__(**fields, arrayrecord_key=_ARRAYS, configrecord_key=_CONFIG)
            self.outer, self.outer_state = outer, None
            self.reference: dict[str, np.ndarray] = {}
            self.hash = hash_of(self.reference)

        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Any
        ) -> Iterable[Any]:
            """Send the reference to the clients of a round."""
            self.reference = _arrays_of(arrays)
            self.hash = hash_of(self.reference)
            if self.outer_state is None:
                self.outer_state = self.outer.init(self.reference)
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            """Take the outer step of the changes that came; (None, None) if none did."""
            # In the order of nodes: a sum of floats depends on its order.
            changes, left_out = dict[int, _Checked](), dict[int, str]()
            for reply in sorted(replies, key=_node_of):
                try:
                    changes[_node_of(reply)] = self._checked(reply)
                except (KeyError, ValueError) as error:
                    left_out[_node_of(reply)] = str(error)
            norms = {node: change.norm for node, change in changes.items()}
            left_out |= too_large(norms, _NORM_LIMIT)
            for node, reason in left_out.items():
                log(_WARNING, "The change of node %d is left out: %s", node, reason)
            counted = [change for node, change in changes.items() if node not in left_out]
            if not counted:
                return None, None
            weights, messages, contents, _ = zip(*counted, strict=True)
            shares = [weight / sum(weights) for weight in weights]
            mean = decode(*messages, weights=shares, like=self.reference)
            reference, self.outer_state = take_outer_step(
                self.outer, mean, self.outer_state, self.reference
            )
            metrics = self.train_metrics_aggr_fn(list(contents), self.weighted_by_key)
            return flower_arrays(reference), metrics

        def _checked(self, reply: Any) -> _Checked:
            """Check a reply.

            Raises:
              ValueError: an error; a message that is damaged, of another reference or of other
                leaves, or that holds NaN or Inf; a weight that is not positive.
              KeyError: a record that is missing.
            """
            if reply.has_error():
                raise ValueError(reply.error.reason)
            content = reply.content
            weight = content[_METRICS][self.weighted_by_key]
            least = np.finfo(np.float64).tiny
            check_number(self.weighted_by_key, weight, least, 1e300, "a positive number")
            its = content[_CONFIG][_HASH]
            if its != self.hash:
                raise ValueError(
                    f"it began at the reference {its}, and the server has {self.hash}."
                )
            message = Message.from_bytes(content[_CHANGE][_CHANGE].data)
            norm = examine([message], leaves_of(self.reference)).norm
            return _Checked(float(weight), message, content, norm)

    return OuterStep
