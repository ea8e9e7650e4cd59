"""EAGLE-1 and EAGLE-2 heads on disk: the checkpoint formats of SafeAILab and of speculators.

Such a head is one decoder layer that guesses the target's next hidden state (Li et al. 2024, arXiv
2401.15077); the target's own LM head makes tokens of it. EAGLE-2 (arXiv 2406.16858) is the same
head with another tree. Inside the package a head has SafeAILab's tensor names.

Shapes: h hidden · D head dimension · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models import head_files
from slipstream.models.eagle3 import SIZES, is_size, layer_words, read_tensors, verifier_of

_NAMES = {"fusion_fc.": "fc.", "transformer.": "layers.0."}  # speculators' → SafeAILab's


@dataclass(frozen=True, kw_only=True)
class Eagle1Shape:
    """bias: of the product that joins embedding and hidden state. verifier: the target's name or
    path, "" if not told."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    bias: bool = True
    eps: float = 1e-6
    rope_theta: float = 10000.0
    verifier: str = ""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that every head has."""
        h, query, kv = self.hidden, self.heads * self.dim, self.kv_heads * self.dim
        layer = {
            "self_attn.q_proj.weight": (query, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, query),
            "mlp.gate_proj.weight": (self.inner, h),
            "mlp.up_proj.weight": (self.inner, h),
            "mlp.down_proj.weight": (h, self.inner),
            "post_attention_layernorm.weight": (h,),
        }
        found: dict[str, tuple[int, ...]] = {"layers.0." + name: s for name, s in layer.items()}
        found["fc.weight"] = (h, 2 * h)
        if self.bias:
            found["fc.bias"] = (h,)
        return found


@dataclass(frozen=True, kw_only=True)
class Eagle1Weights:
    """tensors: by name, as in ``Eagle1Shape.shapes``; "embed_tokens.weight" and "lm_head.weight"
    [V, h] only where they are not the target's."""

    shape: Eagle1Shape
    tensors: Mapping[str, Tensor]


def read(folder: Path, name: str) -> Eagle1Weights:
    """Read a head of either format; ``name`` is the user's word for it in errors.

    Raises SlipstreamError naming what is missing, of another shape or no number.
    """
    words = head_files.read_words(folder / "config.json", name)
    if "draft_vocab_size" in words:
        raise SlipstreamError(f"{name} is an EAGLE-3 head: use it with the method eagle3")
    if words.get("layernorms"):
        raise SlipstreamError(f"{name}: an EAGLE head with further norms, which isn't known here")
    tensors = {_name(key): tensor for key, tensor in read_tensors(folder, name).items()}
    shape = _shape(words, tensors, name)
    wanted, matrix = shape.shapes(), (shape.vocab, shape.hidden)
    allowed = wanted | {"embed_tokens.weight": matrix, "lm_head.weight": matrix}
    head_files.check_tensors(tensors, wanted, allowed, "EAGLE-1", name)
    return Eagle1Weights(shape=shape, tensors=tensors)


def _name(key: str) -> str:
    for theirs, ours in _NAMES.items():
        key = ours + key.removeprefix(theirs) if key.startswith(theirs) else key
    return key


def _shape(words: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Eagle1Shape:
    layer, theta = layer_words(words, name)
    missing = [key for key in SIZES if not is_size(layer.get(key))]
    if missing:
        raise SlipstreamError(f"{name}: config.json lacks {', '.join(missing)}: no EAGLE head")
    return Eagle1Shape(
        hidden=layer["hidden_size"],
        heads=layer["num_attention_heads"],
        kv_heads=layer.get("num_key_value_heads") or layer["num_attention_heads"],
        dim=layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
        inner=layer["intermediate_size"],
        vocab=layer["vocab_size"],
        bias=words.get("fusion_bias", words.get("bias", "fc.bias" in tensors)),
        eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        verifier=verifier_of(words),
    )
