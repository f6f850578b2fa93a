"""Options of the command."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a language model with compressed gradients.

    Without arguments, a small model is made first and fine-tuned twice, with the exact and with the
    compressed mean gradient. An interrupted run resumes with the same command.
    """

    checkpoint: Path | None = None
    """Folder of a model of the Llama or Gemma 3 family: config.json, tokenizer.json and
    *.safetensors; for chats also chat_template.jinja, or chat_template in tokenizer_config.json.
    None pre-trains a small model first."""

    data: Path | None = None
    """Text to train on: a .txt file, or a .jsonl file with one document per line, {"text": ...} or
    {"messages": [{"role": ..., "content": ...}]}. Chats are rendered with the checkpoint's chat
    template; only the assistant's answers are learned."""

    evaluation_data: Path | None = None
    """Text to evaluate on. None holds out the last part of --data."""

    evaluation_share: float = 0.05
    """Share of --data to hold out, unless --evaluation-data is given."""

    evaluation_rows: int = 256
    """Largest number of rows to evaluate on. If there are more, they are thinned out evenly."""

    method: str = "dynamiq:5"
    """How gradients are averaged: psum for the exact mean, or METHOD[:BITS][:FIELD=VALUE], such as
    dynamiq:4, mxfp8, bf16 or ef+topk_chunked:2 (ef+ adds error feedback). The error for an unknown
    method lists all of them. `dynamiq-jax advise` compares them."""

    topology: str = "ring"
    """How gradients travel: ring, butterfly, all_to_all, or auto to choose one by size."""

    compare: bool | None = None
    """Fine-tune with the exact mean too, for a table and plots of both. None compares in the
    demonstration only."""

    workers: int | None = None
    """Data-parallel workers, between which gradients travel compressed. None for one per --fsdp
    devices, of which CPUs have eight virtual ones."""

    fsdp: int = 1
    """Devices over which each worker spreads its parameters, optimizer state and rows, for models
    that do not fit one device. Traffic between them is exact: choose devices with fast links."""

    steps: int = 160
    """Updates."""

    batch: int = 2
    """Rows per worker and micro-batch, a multiple of --fsdp."""

    accumulate: int = 1
    """Micro-batches whose gradients are added before an update. More of them take more time instead
    of more memory. Gradients travel once per update."""

    context: int | None = None
    """Tokens per row. Short documents share a row, without attending to each other; long ones are
    cut. None is 128 in the demonstration and 1024 otherwise."""

    learning_rate: float | None = None
    """Peak of the learning rate, which rises over a tenth of the steps and falls as a cosine. None
    is 2e-3 in the demonstration and 2e-5 otherwise."""

    weight_decay: float = 0.01
    """Weight decay of AdamW, on matrices and embeddings."""

    clip: float = 1.0
    """Largest norm of the mean gradient. A larger gradient is scaled down to it."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of computation. Weights and optimizer state are float32 in any case. None is bfloat16
    on accelerators and float32 on CPUs, which are slow with other dtypes."""

    remat: bool = False
    """Compute the activations of a block again in the backward pass instead of keeping them, which
    takes less memory for a third more work."""

    seed: int = 0
    """Seed of the order of rows and of the rounding of gradients."""

    evaluate_every: int = 20
    """Steps between evaluations on the held-out text."""

    save_every: int = 50
    """Steps between checkpoints. A crash loses at most as many."""

    sample_vnmse: int = 20
    """Steps between measurements of the mean gradient's error, each of which takes an exact mean
    too."""

    pretrain_steps: int = 240
    """Steps of pre-training in the demonstration."""

    output_dir: Path = Path("results/finetune_llm")
    """Folder for checkpoints, metrics.jsonl, plots and the fine-tuned model."""

    restart: bool = False
    """Delete the checkpoints and records of an earlier run in --output-dir instead of resuming
    it."""

    coordinator: str | None = None
    """HOST:PORT of the first of several processes."""

    num_processes: int | None = None
    """Number of processes."""

    process_id: int | None = None
    """Rank of this process, from 0."""

    def __post_init__(self) -> None:
        at_least_one = ("fsdp", "steps", "batch", "accumulate", "pretrain_steps", "evaluation_rows")
        every = ("evaluate_every", "save_every", "sample_vnmse")
        for name in (*at_least_one, *every):
            self._require(name, getattr(self, name) >= 1, "Give at least 1")
        for name in ("workers", "context", "num_processes"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "Give at least 1")
        rate = self.learning_rate
        self._require("learning_rate", rate is None or rate > 0, "Give a positive number")
        self._require("clip", self.clip > 0, "Give a positive number")
        self._require("weight_decay", self.weight_decay >= 0, "Give 0 or more")
        self._require("seed", self.seed >= 0, "Give 0 or more")
        share = self.evaluation_share
        self._require("evaluation_share", 0 < share < 1, "Give a number between 0 and 1")
        even = self.batch % self.fsdp == 0
        self._require("batch", even, f"Give a multiple of --fsdp, which is {self.fsdp}")
        both = (self.checkpoint is None) == (self.data is None)
        self._require("data", both, "Give --checkpoint and --data, or neither")
        several = [self.coordinator, self.num_processes, self.process_id]
        together = several.count(None) in (0, 3)
        remedy = "Give --coordinator, --num-processes and --process-id, or none of them"
        self._require("coordinator", together, remedy)
        alone = self.checkpoint is not None or self.coordinator is None
        remedy = "Give --checkpoint and --data too: the demonstration runs in one process"
        self._require("coordinator", alone, remedy)

    def _require(self, name: str, fine: bool, remedy: str) -> None:
        """Raise ValueError unless an option is fine."""
        if not fine:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(self, name)}. {remedy}.")

    @property
    def is_demo(self) -> bool:
        """True if a model and data are made first."""
        return self.checkpoint is None

    @property
    def compares(self) -> bool:
        """True if there is a run with the exact mean too."""
        return self.is_demo if self.compare is None else self.compare
