"""What a decoder looks like, read from the `config.json` of a Hugging Face checkpoint.

Everything in that file that would change the network and is not built here is refused by name.
What has nothing to do with the network, such as token ids, is kept and written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["llama", "gemma3"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of pre-training.

    Attributes:
        kind: "linear" divides all frequencies by `factor`; "llama3" only the low ones, with a
            smooth transition to the high ones.
        factor: How much longer the context is.
        low_frequency_factor: "llama3": fewer turns than this over the original context are low.
        high_frequency_factor: "llama3": more turns than this are high.
        original_positions: "llama3": the context of pre-training.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        family: "llama" or "gemma3": norms, activation, and scale of the embedding follow from it.
        vocabulary: Number of token ids.
        width: Features per token.
        mlp_width: Features inside the gated MLP.
        layers: Number of blocks.
        heads: Query heads per block.
        kv_heads: Key and value heads per block, each shared by `heads / kv_heads` query heads.
        head_dim: Features per head.
        norm_epsilon: Added to the mean square inside every norm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How they are stretched; never on local layers.
        local_rope_theta: Base of the rotary frequencies of local layers.
        sliding_window: How many tokens, its own among them, a token sees in a local layer.
        local_layers: For each block, whether it is local; empty for none.
        query_scale: Products of queries and keys are divided by the root of this; None for
            `head_dim`.
        tie_embeddings: Whether the embedding is also the output layer.
        max_positions: Longest context that the checkpoint was made for; not enforced.
        source: The `config.json` that this was read from. Not compared.
    """

    family: Family
    vocabulary: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 10_000.0
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()
    query_scale: float | None = None
    tie_embeddings: bool = False
    max_positions: int = 2048
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if self.family not in ("llama", "gemma3"):
            raise ValueError(f"family is {self.family!r}; it has to be 'llama' or 'gemma3'.")
        for name in ("vocabulary", "width", "mlp_width", "layers", "heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it has to be a positive integer.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}; it has to divide heads, which is {self.heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; it has to be even, as features rotate in pairs."
            )
        if len(self.local_layers) not in (0, self.layers):
            raise ValueError(
                f"local_layers has {len(self.local_layers)} entries; it needs one for each of the "
                f"{self.layers} layers."
            )
        if any(self.local_layers) and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"sliding_window is {self.sliding_window}; local layers need at least 1."
            )

    def is_local(self, layer: int) -> bool:
        """Whether tokens of a layer, counted from 0, see those of a sliding window only."""
        return bool(self.local_layers) and self.local_layers[layer]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads the content of a `config.json`.

        Args:
            hf: Its keys and values; `model_type` is "llama", "gemma3_text" or "gemma3", of which
                only the text part is read.

        Returns:
            The configuration.

        Raises:
            ValueError: It describes a network that is not built here; the message names all of
                the keys.
        """
        hf = _text_part(hf)
        family = _FAMILIES[hf["model_type"]]
        read = _DEFAULTS[family] | {key: value for key, value in hf.items() if value is not None}
        problems = [*_unsupported(read), *_unsupported_rope(read), *_unsupported_layers(read)]
        if problems:
            raise ValueError("config.json has what is not supported:\n  " + "\n  ".join(problems))
        rope, local_rope = _rope(read)
        heads = read["num_attention_heads"]
        head_dim = read.get("head_dim", read["hidden_size"] // heads)
        local_layers = tuple(kind == LOCAL for kind in _layer_types(read))
        query_scale = read["query_pre_attn_scalar"] if family == "gemma3" else head_dim
        return cls(
            family=family,
            vocabulary=read["vocab_size"],
            width=read["hidden_size"],
            mlp_width=read["intermediate_size"],
            layers=read["num_hidden_layers"],
            heads=heads,
            kv_heads=read.get("num_key_value_heads", heads),
            head_dim=head_dim,
            norm_epsilon=read["rms_norm_eps"],
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_rope_scaling(rope),
            local_rope_theta=float(local_rope["rope_theta"]),
            sliding_window=read["sliding_window"] if any(local_layers) else None,
            local_layers=local_layers if any(local_layers) else (),
            query_scale=None if query_scale == head_dim else query_scale,
            tie_embeddings=read["tie_word_embeddings"],
            max_positions=read["max_position_embeddings"],
            source=dict(hf),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json`: exactly what was read, where nothing was changed."""
        if self.source and DecoderConfig.from_hf(self.source) == self:
            return dict(self.source)
        gemma = self.family == "gemma3"
        written: dict[str, Any] = {
            "architectures": ["Gemma3ForCausalLM" if gemma else "LlamaForCausalLM"],
            "model_type": "gemma3_text" if gemma else "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_activation" if gemma else "hidden_act": ACTIVATIONS[self.family],
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "rope_scaling": _written_scaling(self.rope_scaling),
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
        }
        if gemma:
            written |= {
                "rope_local_base_freq": self.local_rope_theta,
                "sliding_window": self.sliding_window,
                "layer_types": [
                    LOCAL if self.is_local(layer) else GLOBAL for layer in range(self.layers)
                ],
                "query_pre_attn_scalar": self.query_scale or self.head_dim,
            }
        kept = {key: value for key, value in self.source.items() if key not in _REPLACED}
        return kept | written


LOCAL, GLOBAL = "sliding_attention", "full_attention"
ACTIVATIONS = {"llama": "silu", "gemma3": "gelu_pytorch_tanh"}
_FAMILIES: dict[str, Family] = {"llama": "llama", "gemma3_text": "gemma3"}

# What a key that is absent means; files may leave out all of these.
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
    },
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}

# Spellings of what a changed configuration writes in another one.
_REPLACED = ("rope_parameters", "sliding_window_pattern", "_sliding_window_pattern")

# Keys that change the network, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
    "partial_rotary_factor": (1,),
    "use_bidirectional_attention": (False,),
}


def _text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a `config.json` that may describe an image encoder too."""
    kind = hf.get("model_type")
    if kind == "gemma3" and isinstance(hf.get("text_config"), Mapping):
        outer = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        tokens = {key: hf[key] for key in (*outer, "quantization_config") if key in hf}
        names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
        return names | tokens | dict(hf["text_config"])
    if kind not in _FAMILIES:
        raise ValueError(
            f"model_type is {kind!r}; checkpoints of type 'llama', 'gemma3_text' or 'gemma3' "
            "can be read."
        )
    return hf


def _unsupported(read: Mapping[str, Any]) -> list[str]:
    """Says what each key is that would need a network that is not built here."""
    problems = [
        f"{key} is {read[key]!r}: this is not built; remove it from config.json only if the "
        "weights do not need it."
        for key, neutral in _NEUTRAL.items()
        if key in read and read[key] not in neutral
    ]
    activation = ACTIVATIONS[_FAMILIES[read["model_type"]]]
    for key in ("hidden_act", "hidden_activation"):
        if read.get(key, activation) != activation:
            problems.append(f"{key} is {read[key]!r}; it has to be {activation!r}.")
    return problems


def _layer_types(read: Mapping[str, Any]) -> list[str]:
    """`LOCAL` or `GLOBAL` for each block."""
    layers = read["num_hidden_layers"]
    if "layer_types" in read:
        return list(read["layer_types"])
    if read["model_type"] == "llama":
        return [GLOBAL] * layers
    pattern = read.get("_sliding_window_pattern", read["sliding_window_pattern"])
    return [GLOBAL if (layer + 1) % pattern == 0 else LOCAL for layer in range(layers)]


def _unsupported_layers(read: Mapping[str, Any]) -> list[str]:
    known = {GLOBAL} if read["model_type"] == "llama" else {GLOBAL, LOCAL}
    types = _layer_types(read)
    problems = []
    if other := sorted(set(types) - known):
        problems.append(f"layer_types has {other}; it may have {sorted(known)}.")
    if len(types) != read["num_hidden_layers"]:
        problems.append(
            f"layer_types has {len(types)} entries; num_hidden_layers is "
            f"{read['num_hidden_layers']}."
        )
    return problems


def _rope(read: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Rotary parameters of global and of local layers, from the old keys or the new one."""
    local = {"rope_theta": read.get("rope_local_base_freq", 10_000.0)}
    old = {"rope_theta": read["rope_theta"], **read.get("rope_scaling", {})}
    new = read.get("rope_parameters", {})
    if GLOBAL in new or LOCAL in new:
        return old | new.get(GLOBAL, {}), local | new.get(LOCAL, {})
    return old | new, local


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _unsupported_rope(read: Mapping[str, Any]) -> list[str]:
    rope, local_rope = _rope(read)
    problems = []
    if (kind := _rope_type(rope)) not in ("default", "linear", "llama3"):
        problems.append(f"rope_type is {kind!r}; it may be 'default', 'linear' or 'llama3'.")
    if (kind := _rope_type(local_rope)) != "default":
        problems.append(f"rope_type of {LOCAL} is {kind!r}; it may be 'default'.")
    if rope.get("partial_rotary_factor", 1) != 1:
        problems.append(
            f"partial_rotary_factor is {rope['partial_rotary_factor']}: all features have to turn."
        )
    wanted = {"linear": ["factor"], "llama3": list(_LLAMA3_KEYS)}.get(_rope_type(rope), [])
    problems += [f"{key} is missing beside rope_type." for key in wanted if key not in rope]
    return problems


# Keys of the "llama3" scaling and the arguments of RopeScaling.
_LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = _rope_type(rope)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    return RopeScaling("llama3", **{ours: rope[key] for key, ours in _LLAMA3_KEYS.items()})


def _written_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        **{key: getattr(scaling, ours) for key, ours in _LLAMA3_KEYS.items()},
    }
