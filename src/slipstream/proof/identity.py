"""Greedy identity: the same tokens with a drafter as without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slipstream import sampling
from slipstream.config import SamplingParams
from slipstream.engine import Engine
from slipstream.llm import LLM, Message
from slipstream.runtimes.plain import plain_logits

_CHUNK = 256  # rows of a forward pass whose logits are all wanted

# A batch of rows and a single row round differently. What the gap between the two best logits may
# be for that to decide: far above the rounding seen, far below any gap that a fault leaves alone.
# An exact runtime has no such excuse: there every difference is a fault.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first place where two greedy texts differ.

    position: output token. gap: between the plain token's logit and the other's, or infinite where
    one text ends. kind: "near-tie" is rounding, "fault" is not.
    """

    prompt: str
    position: int
    plain_token: int | None
    other_token: int | None
    gap: float
    kind: Literal["near-tie", "fault"]


def greedy_identity(
    plain: LLM,
    speculative: LLM,
    prompts: Sequence[str],
    max_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> tuple[int, list[Mismatch]]:
    """Answer each prompt both ways; returns the tokens compared and the mismatches.

    advance: called after each prompt.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    tokens, mismatches = 0, []
    for prompt in prompts:
        [(count, found)] = compare_prompts(plain, speculative, [prompt], params)
        tokens += count
        if found is not None:
            mismatches.append(found)
        advance()
    return tokens, mismatches


def compare_prompts(
    plain: LLM, speculative: LLM, prompts: Sequence[str], params: SamplingParams
) -> list[tuple[int, Mismatch | None]]:
    """Answer prompts both ways, greedily, as many at once as the engines take; returns for each the
    plain tokens' count and the mismatch."""
    tokens = [prompt_ids(plain, [{"role": "user", "content": prompt}]) for prompt in prompts]
    first, second = (_answers(llm, tokens, params) for llm in (plain, speculative))
    return [
        (len(expected), compare_tokens(plain, ids, expected, got, params))
        for ids, expected, got in zip(tokens, first, second, strict=True)
    ]


def prompt_ids(llm: LLM, conversation: Sequence[Message]) -> list[int]:
    """Through the chat template; a model without one gets the bare text."""
    if llm.tokenizer.chat_template:
        return llm.chat_tokens(conversation)
    return list(llm.tokenizer(conversation[-1]["content"])["input_ids"])


def _answers(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [output.outputs[0].token_ids for output in llm.generate(asked, params)]


def compare_tokens(
    llm: LLM,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    params: SamplingParams,
) -> Mismatch | None:
    """Find and classify the first difference of two greedy outputs; None if there is none."""
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    a = plain[at] if at < len(plain) else None
    b = other[at] if at < len(other) else None
    gap = float("inf")
    if a is not None and b is not None:
        rows = target_logits(llm.engine, [*prompt, *plain[:at]], len(prompt) + at)
        context = output_context(llm.engine, prompt, plain[:at], [()], params)
        row = sampling.adjust(rows, params, context)[0]
        gap = float(row[a] - row[b])
    runtime = llm.model.runtime
    kind: Literal["near-tie", "fault"] = "fault"
    if not runtime.exact and abs(gap) <= NEAR_TIE[runtime.dtype]:
        kind = "near-tie"
    text = llm.tokenizer.decode(prompt)
    return Mismatch(prompt=text, position=at, plain_token=a, other_token=b, gap=gap, kind=kind)


def target_logits(engine: Engine, tokens: Sequence[int], start: int) -> Tensor:
    """[n, V]: logits for each position from ``start`` to one past the end, plainly computed."""
    return plain_logits(engine.runtime, tokens, start, _CHUNK)[:, : engine.config.vocab_size]


def output_context(
    engine: Engine,
    prompt: Sequence[int],
    output: Sequence[int],
    suffixes: Sequence[Sequence[int]],
    params: SamplingParams,
) -> sampling.Context:
    return sampling.Context(
        prompt=prompt, output=output, suffixes=suffixes, stop_ids=engine.stop_ids(params)
    )
