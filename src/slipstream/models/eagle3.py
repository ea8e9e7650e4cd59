"""EAGLE-3 heads on disk: the checkpoint formats of SafeAILab and of vllm-project/speculators.

A head is one decoder layer on features of its target (Li et al. 2025, arXiv 2503.01840). Inside the
package a head has speculators' tensor names and is written in that format.

Shapes: h hidden · F layers tapped · D head dimension · d draft vocabulary · V the target's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError

VERSION = "0.3.0"  # of the format that is written
_LAYER = "layers.0."
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
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
        return torch.arange(self.config.draft_vocab) + self.tensors["d2t"].long()


def default_taps(layers: int) -> tuple[int, int, int]:
    """The layers whose input the paper's code fuses."""
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


def read(folder: Path, name: str) -> Eagle3Weights:
    """Read a head of either format; ``name`` is the user's word for it in errors.

    Raises SlipstreamError naming what is missing, of another shape, out of range or no number.
    """
    words = _json(folder / "config.json", name)
    tensors = _names(_tensors(folder, name))
    config = _config(words, tensors, name)
    _check(config, tensors, name)
    return Eagle3Weights(config=config, tensors=tensors)


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SlipstreamError(f"{name}: {path} can't be read: {error}") from error
    if not isinstance(words, dict):
        raise SlipstreamError(f"{name}: {path} is not a JSON object")
    return words


def _tensors(folder: Path, name: str) -> dict[str, Tensor]:
    from slipstream.models.weights import Weights

    weights = Weights(folder, name)
    if len(weights):
        return dict(weights)
    path = folder / "pytorch_model.bin"
    if not path.is_file():
        raise SlipstreamError(f"{name}: {folder} has neither *.safetensors nor {path.name}")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise SlipstreamError(f"{name}: {path} can't be read: {error}") from error
    return {key: value for key, value in loaded.items() if isinstance(value, Tensor)}


def _names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """SafeAILab's name of the layer into speculators'."""
    return {
        _LAYER + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key: value
        for key, value in tensors.items()
    }


def _config(words: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Eagle3Config:
    layer = words.get("transformer_layer_config", words)
    missing = [key for key in _SIZES if not isinstance(layer.get(key), int)]
    if not isinstance(words.get("draft_vocab_size"), int):
        missing.append("draft_vocab_size")
    if missing:
        raise SlipstreamError(f"{name}: config.json lacks {', '.join(missing)}: no EAGLE-3 head")
    if layer.get("num_hidden_layers", 1) != 1:
        raise SlipstreamError(f"{name}: a head of {layer['num_hidden_layers']} layers; 1 is known")
    hidden = layer["hidden_size"]
    target_hidden = words.get("target_hidden_size") or hidden
    eagle = words.get("eagle_config", {})
    taps = words.get("eagle_aux_hidden_state_layer_ids")
    taps = taps or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SlipstreamError(f"{name}: a head with scaled rotary embeddings; plain ones are known")
    speculators = words.get("speculators_config", {})
    return Eagle3Config(
        hidden=hidden,
        target_hidden=target_hidden,
        heads=layer["num_attention_heads"],
        kv_heads=layer["num_key_value_heads"],
        dim=layer.get("head_dim") or hidden // layer["num_attention_heads"],
        inner=layer["intermediate_size"],
        vocab=layer["vocab_size"],
        draft_vocab=words["draft_vocab_size"],
        taps=tuple(taps),
        eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or layer.get("rope_theta", 10000.0),
        max_length=layer.get("max_position_embeddings", 2048),
        norm_before_residual=words.get("norm_before_residual", False),
        verifier=(speculators.get("verifier") or {}).get("name_or_path") or "",
    )


def _check(config: Eagle3Config, tensors: Mapping[str, Tensor], name: str) -> None:
    wanted = config.shapes()
    allowed = wanted | {"embed_tokens.weight": (config.vocab, config.hidden)}
    for what, keys in (
        ("lacks", sorted(wanted.keys() - tensors.keys())),
        ("has, and EAGLE-3 has not,", sorted(tensors.keys() - allowed.keys())),
    ):
        if keys:
            shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
            raise SlipstreamError(f"{name}: the checkpoint {what} {shown}")
    for key, tensor in sorted(tensors.items()):
        if tuple(tensor.shape) != allowed[key]:
            raise SlipstreamError(
                f"{name}: {key} is {list(tensor.shape)}, by its config.json {list(allowed[key])}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise SlipstreamError(f"{name}: {key} holds numbers that are none (NaN or infinity)")
    _check_maps(config, tensors, name)


def _check_maps(config: Eagle3Config, tensors: Mapping[str, Tensor], name: str) -> None:
    """d2t and t2d must be one map: offsets to ids in ascending order, and the mask of those ids."""
    ids = Eagle3Weights(config=config, tensors=tensors).target_ids
    if not bool(((ids >= 0) & (ids < config.vocab)).all()):
        raise SlipstreamError(f"{name}: d2t leads out of the vocabulary of {config.vocab} tokens")
    mask = _mask(ids, config.vocab)
    if int(mask.sum()) != config.draft_vocab:
        raise SlipstreamError(f"{name}: d2t leads to the same token twice")
    if not torch.equal(mask, tensors["t2d"].bool()):
        raise SlipstreamError(f"{name}: t2d doesn't mark the tokens that d2t leads to")


def vocabulary_maps(ids: Sequence[int], vocab: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of a draft vocabulary, its target ids ascending."""
    used = torch.tensor(list(ids), dtype=torch.int64)
    assert bool((used[1:] > used[:-1]).all())
    return used - torch.arange(len(used)), _mask(used, vocab)


def _mask(ids: Tensor, vocab: int) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    return mask


def write(folder: Path, head: Eagle3Weights, *, speculative_tokens: int) -> None:
    """Write a head as speculators does. The folder appears complete or not at all."""
    from safetensors.torch import save_file

    temporary = folder.with_name(folder.name + ".part")
    temporary.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in head.tensors.items()}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    words = json.dumps(_words(head.config, speculative_tokens), indent=2)
    (temporary / "config.json").write_text(words + "\n", encoding="utf-8")
    if folder.is_dir():
        old = folder.with_name(folder.name + ".old")
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)


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
