"""Options of the command, and what they have to be."""

import dataclasses
from pathlib import Path

from examples.llm.recipe import Route


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a language model with compressed gradients.

    Without arguments, a new small model is trained twice, with the exact and with the compressed
    mean gradient. An interrupted run resumes with the same command.
    """

    checkpoint: Path | None = None
    """Folder of a model of the Llama family: config.json, tokenizer.json and *.safetensors; for
    chats also a chat template. None makes a small model."""

    data: Path | None = None
    """Text to train on: a .jsonl file with one document per line, {"text": ...} or {"messages":
    [{"role": ..., "content": ...}]}. Of chats, the assistant's answers are learned. The last tenth
    of the documents is held out to evaluate on."""

    method: str = "dynamiq:5"
    """How gradients are averaged: exact for the train step as it is, or
    [ef+|gc+|ef21m+]METHOD[:BITS][:FIELD=VALUE]..., such as dynamiq:4, mxfp8, bf16 or
    ef+dynamiq:3 (ef+ adds error feedback)."""

    topology: str = "ring"
    """How gradients travel: ring, butterfly or all_to_all."""

    route: Route | None = None
    """Function of the library that compresses. compress wraps the train step as it is, and is the
    default. all_reduce_gradients is a part of the optimizer: it alone keeps the states of methods
    such as ef+dynamiq:3, of which it is the default, and records an estimated error in each
    step."""

    compare: bool = False
    """Fine-tune with the exact mean too, for a table of both."""

    workers: int | None = None
    """Data-parallel workers, between which gradients travel compressed. None for one per --fsdp
    devices, of which CPUs have eight virtual ones."""

    fsdp: int = 1
    """Devices over which each worker spreads its parameters, optimizer state and rows, for models
    that do not fit one device. Traffic between them is exact: choose devices with fast links."""

    steps: int = 160
    """Updates."""

    batch: int = 2
    """Rows per worker, a multiple of --fsdp."""

    context: int | None = None
    """Tokens per row. Short documents share a row, without attending to each other; long ones are
    cut. None for 1024, or 128 for the small model."""

    learning_rate: float | None = None
    """Peak of the learning rate, which rises over a tenth of the steps and falls as a cosine. None
    for 2e-5, or 6e-3 for the small model."""

    seed: int = 0
    """Seed of the order of rows, and of the rounding of gradients by all_reduce_gradients. That of
    compress follows from the bits of the gradients."""

    save_every: int = 50
    """Steps between checkpoints. A crash loses at most as many."""

    output_dir: Path = Path("results/finetune_llm")
    """Folder for checkpoints, metrics.jsonl and the fine-tuned model."""

    processes: tuple[str, int, int] | None = None
    """Of a run on several hosts: HOST:PORT of the first process, number of processes, and rank of
    this one."""

    def __post_init__(self) -> None:
        def require(name: str, fine: bool, remedy: str) -> None:
            if not fine:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is {getattr(self, name)}. {remedy}.")

        for name in ("fsdp", "steps", "batch", "context", "save_every", "workers", "learning_rate"):
            value = getattr(self, name)
            require(name, value is None or value > 0, "Give a number above 0")
        require("seed", self.seed >= 0, "Give 0 or more")
        even = self.batch % self.fsdp == 0
        require("batch", even, f"Give a multiple of --fsdp, which is {self.fsdp}")
        both = (self.checkpoint is None) == (self.data is None)
        require("data", both, "Give --checkpoint and --data, or neither")
        alone = self.checkpoint is not None or self.processes is None
        require("processes", alone, "Give --checkpoint and --data too")

    @property
    def is_exact(self) -> bool:
        """Whether nothing is compressed."""
        return self.method == "exact"
