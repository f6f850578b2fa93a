"""Shape of a decoder, from and to the `config.json` of a Hugging Face checkpoint.

Keys that would change the network in a way that is not implemented are refused by name. Keys that
do not concern the network, such as token ids, are kept and written again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

Family = Literal["llama", "gemma3"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies, for contexts longer than that of pre-training."""

    # "linear" divides all frequencies by `factor`; "llama3" divides the low ones, with a smooth
    # transition to the high ones.
    kind: Literal["linear", "llama3"]
    factor: float  # ratio of the context lengths
    # For "llama3": frequencies of fewer turns than this over the original context are low.
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0  # for "llama3": those of more turns are high
    original_positions: int = 8192  # for "llama3": the context of pre-training


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder."""

    family: Family  # determines norms, activation, and scale of the embedding
    vocabulary: int  # token ids
    width: int  # features per token
    mlp_width: int  # features inside the gated MLP
    layers: int  # blocks
    heads: int  # query heads per block
    kv_heads: int  # key and value heads per block; `heads / kv_heads` query heads share one
    head_dim: int  # features per head
    norm_epsilon: float = 1e-6  # added to the mean square inside each norm
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # never used in local layers
    local_rope_theta: float = 10_000.0  # base of the rotary frequencies of local layers
    # Tokens to which a token attends in a local layer, itself included.
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()  # for each block: True if it is local; empty for none
    # Products of queries and keys are divided by the root of this; None for `head_dim`.
    query_scale: float | None = None
    tie_embeddings: bool = False  # True if the embedding is also the output layer
    max_positions: int = 2048  # context that the checkpoint was made for; not enforced
    # The `config.json` that this was read from.
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if self.family not in ("llama", "gemma3"):
            raise ValueError(f"family is {self.family!r}. Give 'llama' or 'gemma3'.")
        for name in ("vocabulary", "width", "mlp_width", "layers", "heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}. Give a positive integer.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}. Give a divisor of heads, which is {self.heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}. Give an even number: features rotate in pairs."
            )
        if len(self.local_layers) not in (0, self.layers):
            raise ValueError(
                f"local_layers has {len(self.local_layers)} entries. Give one for each of the "
                f"{self.layers} layers."
            )
        if any(self.local_layers) and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"sliding_window is {self.sliding_window}. Give at least 1 for local layers."
            )

    def is_local(self, layer: int) -> bool:
        """Return whether tokens of a layer, counted from 0, attend to a sliding window only."""
        return bool(self.local_layers) and self.local_layers[layer]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read the content of a `config.json`.

        Args:
          hf: its keys and values, with a `model_type` of "llama", "gemma3_text" or "gemma3". Of the
            last, only the text part is read.

        Returns:
          The configuration.

        Raises:
          ValueError: the network is not implemented; the message names all keys that prevent it.
        """
        hf = _text_part(hf)
        family = _FAMILIES[hf["model_type"]]
        read = _DEFAULTS[family] | {key: value for key, value in hf.items() if value is not None}
        problems = [*_unsupported(read), *_unsupported_rope(read), *_unsupported_layers(read)]
        if problems:
            raise ValueError("config.json is not supported:\n  " + "\n  ".join(problems))
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
        """Return the content of a `config.json`, the same as was read if nothing has changed."""
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

# Values of keys that a file leaves out.
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

# Other spellings of keys that a changed configuration writes.
_REPLACED = ("rope_parameters", "sliding_window_pattern", "_sliding_window_pattern")

# Keys that change the network, with the values that leave it as it is.
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

# Keys of the "llama3" scaling and the arguments of RopeScaling.
_LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}


def _text_part(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that describes the language model."""
    kind = hf.get("model_type")
    if kind == "gemma3" and isinstance(hf.get("text_config"), Mapping):
        outer = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
        tokens = {key: hf[key] for key in (*outer, "quantization_config") if key in hf}
        names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
        return names | tokens | dict(hf["text_config"])
    if kind not in _FAMILIES:
        raise ValueError(
            f"model_type is {kind!r}. Give a checkpoint of type 'llama', 'gemma3_text' or 'gemma3'."
        )
    return hf


def _unsupported(read: Mapping[str, Any]) -> list[str]:
    """Describe the keys that need a network that is not implemented."""
    problems = [
        f"{key} is {read[key]!r}, which is not implemented. Remove it from config.json only if the "
        "weights do not need it."
        for key, neutral in _NEUTRAL.items()
        if key in read and read[key] not in neutral
    ]
    activation = ACTIVATIONS[_FAMILIES[read["model_type"]]]
    for key in ("hidden_act", "hidden_activation"):
        if read.get(key, activation) != activation:
            problems.append(f"{key} is {read[key]!r}. Only {activation!r} is implemented.")
    return problems


def _layer_types(read: Mapping[str, Any]) -> list[str]:
    """Return `LOCAL` or `GLOBAL` for each block."""
    layers = read["num_hidden_layers"]
    if "layer_types" in read:
        return list(read["layer_types"])
    if read["model_type"] == "llama":
        return [GLOBAL] * layers
    pattern = read.get("_sliding_window_pattern", read["sliding_window_pattern"])
    return [GLOBAL if (layer + 1) % pattern == 0 else LOCAL for layer in range(layers)]


def _unsupported_layers(read: Mapping[str, Any]) -> list[str]:
    """Describe what is not supported in the types of the layers."""
    known = {GLOBAL} if read["model_type"] == "llama" else {GLOBAL, LOCAL}
    types = _layer_types(read)
    problems = []
    if other := sorted(set(types) - known):
        problems.append(f"layer_types has {other}. Only {sorted(known)} are implemented.")
    if len(types) != read["num_hidden_layers"]:
        problems.append(
            f"layer_types has {len(types)} entries, but num_hidden_layers is "
            f"{read['num_hidden_layers']}."
        )
    return problems


def _rope(read: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the rotary parameters of global and local layers, from the old keys or the new one."""
    local = {"rope_theta": read.get("rope_local_base_freq", 10_000.0)}
    old = {"rope_theta": read["rope_theta"], **read.get("rope_scaling", {})}
    new = read.get("rope_parameters", {})
    if GLOBAL in new or LOCAL in new:
        return old | new.get(GLOBAL, {}), local | new.get(LOCAL, {})
    return old | new, local


def _rope_type(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _unsupported_rope(read: Mapping[str, Any]) -> list[str]:
    """Describe what is not supported in the rotary parameters."""
    rope, local_rope = _rope(read)
    problems = []
    if (kind := _rope_type(rope)) not in ("default", "linear", "llama3"):
        problems.append(
            f"rope_type is {kind!r}. Only 'default', 'linear' and 'llama3' are implemented."
        )
    if (kind := _rope_type(local_rope)) != "default":
        problems.append(f"rope_type of {LOCAL} is {kind!r}. Only 'default' is implemented.")
    if rope.get("partial_rotary_factor", 1) != 1:
        problems.append(
            f"partial_rotary_factor is {rope['partial_rotary_factor']}. Only 1 is implemented."
        )
    wanted = {"linear": ["factor"], "llama3": list(_LLAMA3_KEYS)}.get(_rope_type(rope), [])
    problems += [f"{key} is missing. Add it beside rope_type." for key in wanted if key not in rope]
    return problems


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
