"""Muon (Jordan et al., 2024) as the optimizer of training benchmarks.

It orthogonalizes the momentum of each matrix, which gives all directions the same weight: also
those in which a gradient has little but the noise of its rounding.
"""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers


def muon(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Build Muon with updates as large as those of AdamW, so that one learning rate serves both."""
    return optax.contrib.muon(
        learning_rate,
        adam_b2=0.95,
        muon_weight_dimension_numbers=orthogonalized,
        consistent_rms=0.2,
    )


def orthogonalized(params: Any) -> Any:
    """Choose what Muon orthogonalizes: matrices of layers. AdamW takes embeddings and the rest."""

    def choice(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        of_layer = leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path)
        return MuonDimensionNumbers() if of_layer else None

    return jax.tree.map_with_path(choice, params)
