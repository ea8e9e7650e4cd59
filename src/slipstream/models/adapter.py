"""Any transformers decoder with softmax attention, run as a pure function.

The model is loaded with an attention function of ours (transformers' public registry). Attention
then runs in two parts under one softmax: over committed KV, which it reads, and over this step's
new KV, which it hands back. transformers' own caches and masks are not used at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from slipstream.errors import SlipstreamError

ATTENTION = "slipstream_two_part"
_BRANCHABLE = {"full_attention", "sliding_attention", "chunked_attention", "moe"}
_RECURRENT = ("mixer", "recurrentblock", "deltanet", "lstmlayer", "selfattention", "shortconv")


@dataclass(kw_only=True)
class StepContext:
    """What attention needs to know of a step; travels through the model as a keyword argument.

    past_keys, past_values: committed KV, a layer each, [B, kv_heads, T, D]; None for nothing.
    lengths: [B] committed tokens. positions: [B, Q]. tree: [B, Q, Q] bool, who sees whom.
    new_keys, new_values: filled layer by layer, [B, kv_heads, Q, D]. windows: seen on the way.
    """

    past_keys: Sequence[Tensor] | None
    past_values: Sequence[Tensor] | None
    lengths: Tensor
    positions: Tensor
    tree: Tensor
    new_keys: dict[int, Tensor] = field(default_factory=dict)
    new_values: dict[int, Tensor] = field(default_factory=dict)
    windows: set[int | None] = field(default_factory=set)
    _hidden: dict[int | None, Tensor] = field(default_factory=dict)

    def past(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Committed KV of a layer, [B, kv_heads, T, D]."""
        if self.past_keys is None or self.past_values is None:
            return key[:, :, :0], value[:, :, :0]
        return self.past_keys[layer], self.past_values[layer]

    def hidden(self, window: int | None, past: int) -> Tensor:
        """[B, 1, 1, Q, T + Q] bool: what each row must not see; one for all layers of a window.

        A row at position p sees positions above p - window, as transformers counts it.
        """
        if window not in self._hidden:
            place = torch.arange(past, device=self.tree.device)
            seen = (place < self.lengths[:, None, None]).expand(-1, self.tree.shape[1], -1)
            tree = self.tree
            if window is not None:
                low = self.positions[:, :, None] - window  # [B, Q, 1]
                seen = seen & (place > low)
                tree = tree & (self.positions[:, None, :] > low)
            self._hidden[window] = ~torch.cat([seen, tree], -1)[:, None, None]
        return self._hidden[window]


def two_part_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slipstream_step: StepContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' registry calls it.

    query: [B, heads, Q, D]; key, value: [B, kv_heads, Q, D] of this step's tokens; returns
    [B, Q, heads, D]. softcap: c·tanh(x/c) on the scores. s_aux: [heads], a sink a head, which
    takes part in the softmax and is then dropped.
    """
    step = slipstream_step
    if step is None or position_bias is not None:
        what = "does not hand keyword arguments on" if step is None else "adds a position bias"
        raise SlipstreamError(f"{type(module).__name__} {what}: this architecture isn't supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    step.new_keys[layer], step.new_values[layer] = key, value
    step.windows.add(sliding_window)
    past_key, past_value = step.past(layer, key, value)
    batch, heads, rows, dim = query.shape
    kv_heads, past = key.shape[1], past_key.shape[2]
    groups = heads // kv_heads
    query = (query * (dim**-0.5 if scaling is None else scaling)).reshape(
        batch, kv_heads, groups * rows, dim
    )
    scores = torch.cat([query @ past_key.transpose(2, 3), query @ key.transpose(2, 3)], -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, kv_heads, groups, rows, past + rows)
    hidden = step.hidden(sliding_window, past)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, kv_heads, groups, 1, 1)
        scores = torch.cat([scores, sinks.expand(batch, -1, -1, rows, -1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    weights = weights.view(batch, kv_heads, groups * rows, -1)
    out = weights[..., :past] @ past_value + weights[..., past : past + rows] @ value
    return out.view(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, two_part_attention)

# Held against transformers' own forward by the tests; others are when they are loaded.
TESTED = [
    "cohere2",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
]


def check_model(model: Any, name: str) -> None:
    """Raise if a model class keeps a state of its own or bypasses the attention registry."""
    kind = model.config.model_type
    layers = _stateful_layers(model)
    if layers:
        raise SlipstreamError(
            f"{name} ({kind}) has layers with a state of their own, as recurrent ones have "
            f"({', '.join(layers)}): it can't be branched yet; choose a model with plain "
            "attention in every layer"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise SlipstreamError(
            f"{name} ({kind}) computes attention outside transformers' attention registry: this "
            "architecture isn't supported"
        )


def _stateful_layers(model: Any) -> list[str]:
    """The classes of layers that keep more than keys and values, else the kinds the config names.

    transformers said so of a whole model up to 5.24 (``_is_stateful``); since then the kinds of its
    layers tell, but for the few that name none (RWKV, xLSTM).
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _BRANCHABLE
    names = {type(m).__name__ for m in model.modules()}
    always = {n for n in names if n.startswith(("Rwkv", "xLSTM"))}
    if not (kinds or always or getattr(model, "_is_stateful", False)):
        return []
    return sorted(n for n in names if n.lower().endswith(_RECURRENT)) or sorted(kinds)


class FunctionalModel:
    """A causal language model as ``forward(tokens, context, rows) → logits``.

    The model must have been loaded with ``attn_implementation=ATTENTION``. For one thread at a
    time.
    """

    def __init__(self, model: Any, name: str) -> None:
        check_model(model, name)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.windows: set[int | None] = set()  # that attention was called with
        self._rows: tuple[Tensor, Tensor] | None = None
        head = model.get_output_embeddings()
        head.register_forward_pre_hook(self._select_rows)
        self._taps: Sequence[int] = ()
        self._tapped: dict[int, Tensor] = {}
        self._tap_layers()

    def _select_rows(self, _: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Before the head: [B, Q, hidden] → [1, N, hidden], the rows asked for."""
        if self._rows is None:  # the model runs by itself
            return args
        batch, row = self._rows
        return (args[0][batch, row].unsqueeze(0),)

    def _tap_layers(self) -> None:
        """Have each layer's input, and the last one's output, put where ``forward`` finds it."""
        count = self.model.config.get_text_config().num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList))
        layers = next((found for found in lists if len(found) == count), ())

        def keep(tap: int, hidden: Tensor) -> None:
            if tap in self._taps:
                self._tapped[tap] = hidden

        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, i=i: keep(i, args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
            if i + 1 == count:
                layer.register_forward_hook(
                    lambda _, args, out: keep(count, out[0] if isinstance(out, tuple) else out)
                )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        context: StepContext,
        rows: tuple[Tensor, Tensor],
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """tokens: [B, Q]. rows: the batch and row index of each of N rows. Returns logits [N, V]
        and, of the layers tapped, features [B, Q, taps, hidden]."""
        self._rows, self._taps, self._tapped = rows, taps, {}
        try:
            output = self.model(
                input_ids=tokens,
                position_ids=context.positions,
                use_cache=False,
                slipstream_step=context,
            )
        finally:
            self._rows = None
        self.windows |= context.windows
        logits: Tensor = output.logits[0]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not taps:
            return logits, None
        if len(self._tapped) < len(set(taps)):
            raise SlipstreamError(
                f"{type(self.model).__name__} has no layers that can be tapped at {list(taps)}"
            )
        return logits, torch.stack([self._tapped[tap] for tap in taps], 2)

    @torch.inference_mode()
    def own_logits(self, tokens: Tensor) -> Tensor:
        """[1, Q] → [Q, V]: the model's own forward pass, with the attention it is set to."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits.float()
