"""Hyperparameters of a run, and the optimizer that they make."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import optax

import dynamiq_jax as dq

Route = Literal["compress", "all_reduce_gradients"]  # functions of dynamiq_jax
ROUTES: tuple[Route, ...] = get_args(Route)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a run."""

    # Or methods by pattern of the parameter's path.
    method: str | dict[str, str | dq.methods.Method] = "exact"
    topology: str = "ring"
    route: Route | None = None  # function that compresses; None for that of the method
    steps: int
    learning_rate: float  # the peak, after a rise over a tenth of the steps
    seed: int = 0  # of the batches, and of the rounding noise of all_reduce_gradients

    @property
    def name(self) -> str:
        """Name of a run."""
        return "exact" if self.is_exact else f"{self.method}:{self.topology}"

    @property
    def is_exact(self) -> bool:
        """Whether nothing is compressed."""
        return self.method == "exact"

    @property
    def chosen_route(self) -> Route:
        """Function that compresses gradients."""
        if self.route is not None:
            return self.route
        # It alone has names of leaves and a place for states.
        if isinstance(self.method, dict) or dq.methods.resolve_method(self.method).is_stateful:
            return "all_reduce_gradients"
        return "compress"

    def facts(self) -> dict[str, Any]:
        """Return everything that losses depend on."""
        return dataclasses.asdict(self) | {"route": self.chosen_route}

    def optimizer(self) -> optax.GradientTransformation:
        """Build the transformation from the mean gradient to the update."""
        rise = round(0.1 * self.steps)
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / (rise + 1),  # A rate of zero would waste a step.
            peak_value=self.learning_rate,
            warmup_steps=rise,
            decay_steps=self.steps,
            end_value=0.1 * self.learning_rate,
        )
        # The mean is clipped: the gradients of single workers have other norms.
        return optax.chain(optax.clip_by_global_norm(1.0), self.update_rule(schedule))

    def update_rule(self, schedule: optax.Schedule) -> optax.GradientTransformation:
        """Build the transformation from the clipped mean gradient to the update: AdamW."""
        return optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=0.01,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        )
