"""A step of FSDP gathers its weights compressed over slow links, by the lines of the recipe."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.trainers.recipe import run_lines

WIDTH, VOCABULARY, STEPS = 64, 256, 10


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, tokens):
        return self.embedding.attend(self.block(self.embedding(tokens)))


@pytest.mark.slow
def test_weights_gathered_compressed_train_as_exact_ones():
    graph, params = nnx.split(Transformer(nnx.Rngs(0)))

    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params)(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer, losses, sent = optax.adam(1e-3), {}, {}
    tokens = jax.random.randint(jax.random.key(1), (16, 32), 0, VOCABULARY)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for method in ("exact", "dynamiq:8"):
            lines = {"jax": jax, "dq": dq, "P": P, "AxisType": AxisType, "params": params}
            lines["loss_fn"] = loss_fn
            run_lines("sharding.md", "Weights gathered over slow links", lines, method)
            step, mesh = lines["loss_and_grads"], lines["mesh"]
            placed = jax.device_put(
                params,
                jax.tree.map(lambda spec, mesh=mesh: NamedSharding(mesh, spec), lines["parts"]),
            )
            compiled = step.lower(placed, tokens, jax.random.key(0)).compile()
            sent[method] = sent_by_axes(compiled.as_text(), mesh)[("hosts",)]
            state = optimizer.init(placed)
            for number in range(STEPS):
                loss, grads = step(placed, tokens, jax.random.key(number))
                updates, state = optimizer.update(grads, state, placed)
                placed = optax.apply_updates(placed, updates)
            losses[method] = float(loss)
    assert losses["exact"] < 5.0
    np.testing.assert_allclose(losses["dynamiq:8"], losses["exact"], rtol=0.01)
    assert losses["dynamiq:8"] != losses["exact"]
    assert 3.3 < sent["exact"] / sent["dynamiq:8"] < 4
    print(losses, sent)
