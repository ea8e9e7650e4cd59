"""Attention in two parts under one softmax, and what can't run that way."""

from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tiny_models import BASE, build
from transformers import AutoModelForCausalLM, LlamaConfig

from slipstream.errors import SlipstreamError
from slipstream.models.adapter import (
    ATTENTION,
    FunctionalModel,
    StepContext,
    check_model,
    two_part_attention,
)
from slipstream.models.shape import check_config, context_length
from slipstream.runtimes.torch import TorchRuntime

HEADS, KV_HEADS, DIM = 4, 2, 8


class Layer(torch.nn.Module):
    layer_idx = 0


def tensors(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def naive(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sink: float | None,
) -> torch.Tensor:
    """One head, one row: query [D], keys and values [n, D] of all it may see."""
    scores = keys @ query * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat([scores, scores.new_tensor([sink])])
    return scores.softmax(-1)[: len(keys)] @ values


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_two_parts_under_one_softmax(
    window: int | None, scaling: float | None, softcap: float | None, sinks: bool
) -> None:
    """Against one plain softmax over all that a row may see; lengths 5 and 2, a small tree."""
    lengths, parents = [5, 2], [-1, 0, 0, 2]
    depth, seen_by = [0, 1, 1, 2], [[0], [0, 1], [0, 2], [0, 2, 3]]
    query = tensors(2, HEADS, 4, DIM)
    key, value = tensors(2, KV_HEADS, 4, DIM), tensors(2, KV_HEADS, 4, DIM) + 1
    past_key, past_value = tensors(2, KV_HEADS, 5, DIM) - 1, tensors(2, KV_HEADS, 5, DIM) + 2
    past_key[1, :, 2:] = past_value[1, :, 2:] = 1e6  # beyond the second request's length
    positions = torch.tensor([[length + d for d in depth] for length in lengths])
    tree = torch.zeros(2, 4, 4, dtype=torch.bool)
    for row, visible in enumerate(seen_by):
        tree[:, row, visible] = True
    s_aux = tensors(HEADS) if sinks else None
    step = StepContext(
        past_keys=[past_key],
        past_values=[past_value],
        lengths=torch.tensor(lengths),
        positions=positions,
        tree=tree,
    )
    got, _ = two_part_attention(
        Layer(),
        query,
        key,
        value,
        None,
        slipstream_step=step,
        scaling=scaling,
        sliding_window=window,
        softcap=softcap,
        s_aux=s_aux,
    )
    assert got.shape == (2, 4, HEADS, DIM)
    for b, length in enumerate(lengths):
        for row in range(len(parents)):
            low = -1 if window is None else length + depth[row] - window
            old = [i for i in range(length) if i > low]
            new = [i for i in seen_by[row] if length + depth[i] > low]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                want = naive(
                    query[b, head, row],
                    torch.cat([past_key[b, kv, old], key[b, kv, new]]),
                    torch.cat([past_value[b, kv, old], value[b, kv, new]]),
                    scaling=DIM**-0.5 if scaling is None else scaling,
                    softcap=softcap,
                    sink=None if s_aux is None else float(s_aux[head]),
                )
                # the softmax itself is computed in float32, as transformers does
                torch.testing.assert_close(got[b, row, head], want, atol=1e-5, rtol=1e-5)
    assert step.new_keys[0] is key
    assert step.new_values[0] is value


def small(kind: str, **options: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**options)
    return AutoModelForCausalLM.from_config(config)


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(SlipstreamError, match=r"my-model.*encoder-decoder.*t5.*decoder-only"):
        check_config(transformers.T5Config(), "my-model")


@pytest.mark.parametrize(
    ("kind", "options", "layer"),
    [
        ("Qwen3Next", {}, "linear_attention"),
        ("Lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv"),
        ("Jamba", {}, "linear_attention|mamba"),
        ("Bamba", {}, "linear_attention|mamba"),
    ],
)
def test_a_hybrid_is_refused_by_the_name_of_its_layers(
    kind: str, options: dict[str, Any], layer: str
) -> None:
    config = getattr(transformers, f"{kind}Config")(**options)
    with pytest.raises(SlipstreamError, match=rf"my-model.*0 \(({layer})\)"):
        check_config(config, "my-model")


@pytest.mark.parametrize(
    "layer_types",
    [["full_attention", "linear_attention"], ["chunked_attention", "full_attention"]],
)
def test_layer_types_that_are_no_softmax_attention_are_refused(layer_types: list[str]) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.layer_types = layer_types
    with pytest.raises(SlipstreamError, match=r"my-model \(llama\).*\d \((linear|chunked)_att"):
        check_config(config, "my-model")


@pytest.mark.parametrize(
    ("kind", "options", "layer"),
    [
        ("Mamba", {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 2}, "MambaMixer"),
        (
            "Rwkv",
            {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 2},
            "RwkvSelfAttention",
        ),
        (  # a hybrid: its attention layers are of the registry
            "Lfm2",
            {
                "vocab_size": 9,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
            },
            "Lfm2ShortConv",
        ),
    ],
)
def test_a_recurrent_model_is_refused_by_the_name_of_its_layers(
    kind: str, options: dict[str, Any], layer: str
) -> None:
    with pytest.raises(SlipstreamError, match=f"my-model.*recurrent.*{layer}"):
        check_model(small(kind, **options), "my-model")


def test_attention_outside_the_registry_is_refused() -> None:
    """Bloom computes its own attention: it would silently ignore committed KV."""
    model = small("Bloom", vocab_size=9, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(SlipstreamError, match=r"my-model.*bloom.*isn't supported"):
        check_model(model, "my-model")
    with pytest.raises(SlipstreamError, match=r"my-model.*bloom.*isn't supported"):
        TorchRuntime(model, "my-model")


def test_a_position_bias_or_a_lost_step_is_refused() -> None:
    q = tensors(1, HEADS, 1, DIM)
    with pytest.raises(SlipstreamError, match="keyword arguments"):
        two_part_attention(Layer(), q, q, q, None)
    step = StepContext(
        past_keys=None,
        past_values=None,
        lengths=torch.zeros(1),
        positions=torch.zeros(1, 1),
        tree=torch.ones(1, 1, 1, dtype=torch.bool),
    )
    with pytest.raises(SlipstreamError, match="position bias"):
        two_part_attention(Layer(), q, q, q, None, slipstream_step=step, position_bias=q)


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_supported_architectures_pass_the_checks(name: str) -> None:
    config = tiny_models.config(name)
    check_config(config, name)
    check_model(build(config, "eager"), name)


def test_a_model_with_another_attention_than_ours_is_not_taken() -> None:
    """It would compute, and ignore all that was committed."""
    model = build(transformers.LlamaConfig(**BASE), "eager")
    with pytest.raises(SlipstreamError):
        TorchRuntime(model, "my-model")


def test_logits_come_in_float32_or_in_float64() -> None:
    for dtype, want in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = FunctionalModel(
            build(transformers.LlamaConfig(**BASE), ATTENTION, dtype=dtype), "tiny"
        )
        step = StepContext(
            past_keys=None,
            past_values=None,
            lengths=torch.tensor([0]),
            positions=torch.tensor([[0]]),
            tree=torch.ones(1, 1, 1, dtype=torch.bool),
        )
        rows = (torch.tensor([0]), torch.tensor([0]))
        logits, _ = model.forward(torch.tensor([[1]]), step, rows)
        assert logits.dtype == want


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 256),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
)
def test_a_context_ends_where_rotation_would_depend_on_other_rows(
    rope: dict[str, Any], longest: int
) -> None:
    """Long rotation is chosen by the longest position of a whole pass: a draft would change it."""
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope
    )
    assert context_length(config) == longest
