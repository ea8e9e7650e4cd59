"""EAGLE-3 heads on disk: the checkpoint formats of SafeAILab and of vllm-project/speculators.

A head is one decoder layer on features of its target (Li et al. 2025, arXiv 2503.01840). Inside the
package a head has speculators' tensor names and is written in that format.

Shapes: h hidden · F layers tapped · D head dimension · d draft vocabulary · V the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models import head_files
from slipstream.models.head_files import vocabulary_maps as vocabulary_maps

VERSION = "0.3.0"  # of the format that is written
_LAYER = "layers.0."
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """taps: layers of the target whose input is a feature; () if the checkpoint doesn't tell, as
        SafeAILab's don't: then they are ``default_taps`` of the target.
    norm_before_residual: whether the residual is the normed hidden state.
    verifier: the target's name or path, "" if not told.
    """

    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    draft_vocab: int
    taps: Sequence[int] = ()
    eps: float = 1e-5
    rope_theta: float = 10000.0
    max_length: int = 2048
    norm_before_residual: bool = False
    verifier: str = ""

    @property
    def features(self) -> int:
        """F·h of the target: what ``fc`` takes. Three layers where ``taps`` doesn't tell."""
        return (len(self.taps) or 3) * self.target_hidden

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that every head has."""
        h, query, kv = self.hidden, self.heads * self.dim, self.kv_heads * self.dim
        layer = {
            "hidden_norm.weight": (h,),
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (query, 2 * h),
            "self_attn.k_proj.weight": (kv, 2 * h),
            "self_attn.v_proj.weight": (kv, 2 * h),
            "self_attn.o_proj.weight": (h, query),
            "mlp.gate_proj.weight": (self.inner, h),
            "mlp.up_proj.weight": (self.inner, h),
            "mlp.down_proj.weight": (h, self.inner),
        }
        outer = {
            "fc.weight": (h, self.features),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab, h),
            "d2t": (self.draft_vocab,),
            "t2d": (self.vocab,),
        }
        return {_LAYER + name: shape for name, shape in layer.items()} | outer


@dataclass(frozen=True, kw_only=True)
class Eagle3Weights:
    """tensors: by name, as in ``Eagle3Config.shapes``; "embed_tokens.weight" [V, h] only where the
    head does not share its target's embedding."""

    config: Eagle3Config
    tensors: Mapping[str, Tensor]

    @property
    def target_ids(self) -> Tensor:
        """[d]: the target's id of each token of the draft vocabulary."""
        return head_files.target_ids(self.tensors["d2t"])


def within(head: Eagle3Weights, vocab_size: int) -> Eagle3Weights:
    """Without the draft tokens from id ``vocab_size`` on: padding of the target's matrices."""
    config, ids = head.config, head.target_ids
    kept = ids < vocab_size
    if bool(kept.all()):
        return head
    tensors = {**head.tensors, "lm_head.weight": head.tensors["lm_head.weight"][kept]}
    tensors["d2t"], tensors["t2d"] = vocabulary_maps(ids[kept].tolist(), config.vocab)
    return Eagle3Weights(config=replace(config, draft_vocab=int(kept.sum())), tensors=tensors)


def default_taps(layers: int) -> tuple[int, int, int]:
    """The layers whose input the paper's code fuses."""
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


def read(folder: Path, name: str) -> Eagle3Weights:
    """Read a head of either format; ``name`` is the user's word for it in errors.

    Raises SlipstreamError naming what is missing, of another shape, out of range or no number.
    """
    words = head_files.read_words(folder / "config.json", name)
    tensors = _names(read_tensors(folder, name))
    config = _config(words, tensors, name)
    if config.draft_vocab == config.vocab and "d2t" not in tensors:  # nothing to map
        tensors["d2t"], tensors["t2d"] = vocabulary_maps(range(config.vocab), config.vocab)
    _check(config, tensors, name)
    return Eagle3Weights(config=config, tensors=tensors)


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All of a checkpoint, whichever file they are in."""
    from slipstream.models.weights import Weights

    weights = Weights(folder, name)
    if len(weights):
        return dict(weights)
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise SlipstreamError(f"{name}: {folder} has neither *.safetensors nor {path.name}")
    return head_files.read_pickled(path, name)


def _names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SafeAILab's name of the layer into speculators'."""
    return {
        _LAYER + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key: value
        for key, value in tensors.items()
    }


def _config(words: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Eagle3Config:
    layer, theta = layer_words(words, name)
    missing = [key for key in SIZES if not is_size(layer.get(key))]
    if not is_size(words.get("draft_vocab_size")):
        missing.append("draft_vocab_size")
    if missing:
        raise SlipstreamError(f"{name}: config.json lacks {', '.join(missing)}: no EAGLE-3 head")
    hidden = layer["hidden_size"]
    target_hidden = words.get("target_hidden_size") or hidden
    taps = _taps(words, name)
    return Eagle3Config(
        hidden=hidden,
        target_hidden=target_hidden,
        heads=layer["num_attention_heads"],
        kv_heads=layer.get("num_key_value_heads") or layer["num_attention_heads"],
        dim=layer.get("head_dim") or hidden // layer["num_attention_heads"],
        inner=layer["intermediate_size"],
        vocab=layer["vocab_size"],
        draft_vocab=words["draft_vocab_size"],
        taps=taps,
        eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_length=layer.get("max_position_embeddings", 2048),
        norm_before_residual=words.get("norm_before_residual", False),
        verifier=verifier_of(words),
    )


def _taps(words: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """speculators and vLLM number the layer whose input is meant, SpecForge's nested form the one
    whose output is."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = mapping(words, "eagle_config").get(key) or []
    taps = words.get(key) or nested
    if not isinstance(taps, list) or not all(type(t) is int and t >= 0 for t in taps):
        raise SlipstreamError(f"{name}: {key} is {taps!r}, not a list of layers")
    return tuple(t + 1 for t in taps) if not words.get(key) else tuple(taps)


def mapping(words: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands under a key, {} where nothing does."""
    value = words.get(key)
    return value if isinstance(value, Mapping) else {}


def is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def verifier_of(words: Mapping[str, Any]) -> str:
    return mapping(mapping(words, "speculators_config"), "verifier").get("name_or_path") or ""


def layer_words(words: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], float]:
    """What either format's config.json says of the layer, and its rotary base; refuses a layer of a
    kind that isn't known."""
    layer = mapping(words, "transformer_layer_config") or words
    if layer.get("num_hidden_layers", 1) != 1:
        raise SlipstreamError(f"{name}: a head of {layer['num_hidden_layers']} layers; 1 is known")
    rope = mapping(layer, "rope_parameters") or mapping(layer, "rope_scaling")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SlipstreamError(f"{name}: a head with scaled rotary embeddings; plain ones are known")
    return layer, rope.get("rope_theta") or layer.get("rope_theta", 10000.0)


def _check(config: Eagle3Config, tensors: Mapping[str, Tensor], name: str) -> None:
    wanted = config.shapes()
    allowed = wanted | {"embed_tokens.weight": (config.vocab, config.hidden)}
    head_files.check_tensors(tensors, wanted, allowed, "EAGLE-3", name)
    head_files.check_maps(tensors, config.vocab, name)


def write(folder: Path, head: Eagle3Weights, *, speculative_tokens: int) -> None:
    """Write a head as speculators does. The folder appears complete or not at all."""
    words = _words(head.config, speculative_tokens)
    head_files.write(folder, "model.safetensors", head.tensors, words)


def _words(config: Eagle3Config, speculative_tokens: int) -> dict[str, Any]:
    """config.json, for speculators and vLLM."""
    layer = {
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab,
        "norm_before_residual": config.norm_before_residual,
        "target_hidden_size": config.target_hidden,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.verifier, "architectures": []},
        },
    }
