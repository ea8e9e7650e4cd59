"""The same prompt with and without speculation, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import SamplingParams
from slipstream.llm import LLM, Message, Prompt
from slipstream.proof.identity import Mismatch, compare_tokens
from slipstream.stream import RequestOutput, tokens_per_second
from slipstream.text import Piece

_WARM_UP = 4  # tokens each way before the clock runs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """mismatch: the first difference of two greedy texts, classified; None if they are the same,
    or sampled (then their distribution is the same, not their text). cut: somebody had enough
    before both texts were complete: nothing is said of them, and the second may not be there."""

    model: str
    method: str
    plain: RequestOutput
    speculative: RequestOutput | None
    mismatch: Mismatch | None
    cut: bool = False

    @property
    def identical(self) -> bool | None:
        if self.cut or self.speculative is None:
            return None
        return self.plain.outputs[0].text == self.speculative.outputs[0].text

    @property
    def speedup(self) -> float | None:
        """Plain seconds per token over speculative seconds per token."""
        if self.cut or self.speculative is None:
            return None
        return tokens_per_second(self.speculative) / tokens_per_second(self.plain)

    def as_dict(self) -> dict[str, Any]:
        after, speedup = self.speculative, self.speedup
        return {
            "model": self.model,
            "method": self.method,
            "plain": run_dict(self.plain),
            "speculative": run_dict(after) | after.metrics.as_dict() if after else None,
            "identical": self.identical,
            "speedup": None if speedup is None else round(speedup, 3),
        }


def compare(
    speculative: LLM,
    method: str,
    prompt: Prompt | Sequence[Message],
    params: SamplingParams,
    on_piece: Callable[[str, Piece], None] = lambda run, piece: None,
    stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Decode plainly, then speculatively; on_piece gets "plain" or "speculative" and the text.

    stop: asked after every piece; ends the text at hand and all that was to come. Without a seed
    one is drawn and used for both.
    """
    plain = speculative.with_speculation(None)
    if params.max_tokens is None or params.max_tokens > _WARM_UP:
        few = replace(params, max_tokens=_WARM_UP, min_tokens=0)
        for llm in (plain, speculative):
            llm.stream(prompt, few).read(lambda piece: None)
    before = plain.stream(prompt, params).read(lambda piece: on_piece("plain", piece), stop)
    params, after, mismatch = replace(params, seed=before.seed), None, None
    if not stop():
        stream = speculative.stream(prompt, params)
        after = stream.read(lambda piece: on_piece("speculative", piece), stop)
    cut = stop()
    if params.greedy and after is not None and not cut:
        first, second = (run.outputs[0].token_ids for run in (before, after))
        mismatch = compare_tokens(plain, before.prompt_token_ids, first, second, params)
    return Comparison(
        model=speculative.model.name,
        method=method,
        plain=before,
        speculative=after,
        mismatch=mismatch,
        cut=cut,
    )


def run_dict(run: RequestOutput) -> dict[str, Any]:
    """The figures of one answer, for ``--json``."""
    return {
        "text": run.outputs[0].text,
        "tokens": len(run.outputs[0].token_ids),
        "seconds": round(run.seconds, 4),
        "tokens_per_second": round(tokens_per_second(run), 3),
    }
