"""Verification: which part of a draft stands, and which token comes next.

Glossary: *target_probs* and *draft_probs* are distributions after temperature, truncation and
penalties. A draft token is *accepted* or *rejected*; the token emitted at the first rejection is
*recovered* from the residual; after a path accepted to its end comes a *bonus* token.
Row 0 of ``target_probs`` belongs to the newest token, row i + 1 to draft token i.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.noise import Noise
from slipstream.types import ROOT, Draft, Origin, Verdict

_EPSILON, _DELTA = 0.09, 0.3  # of typical acceptance


def follow(draft: Draft, choose: Callable[[int], int]) -> Verdict:
    """Walk down a deterministic draft for as long as it holds the target's own choice.

    choose: row → the target's token there: the argmax when greedy, a sample of its distribution
        otherwise; asked once for each row on the path.

    Exact because every token emitted is the target's own; equal to rejection sampling with a
    one-hot draft distribution (accept with p(x), else p without x, renormalised).
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = choose(node + 1)
        children = draft.children(node)
        match = next((child for child in children if draft.tokens[child] == token), None)
        if match is None:
            return Verdict(path=path, next_token=token, origin=_origin(draft, children))
        path.append(match)
        node = match


def rejection_sample(draft: Draft, target_probs: Tensor, noise: Noise, position: int) -> Verdict:
    """Modified rejection sampling on a tree of sampled tokens.

    Chains: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318). Siblings:
    recursive rejection sampling, Jeon et al. 2024 (2402.14160) and Sequoia (2402.12374). A child
    that was not drawn, as where earlier siblings left nothing to draw, has a one-hot row.

    target_probs: [n + 1, V].
    position: of the first token after the newest one.
    """
    assert draft.draft_probs is not None
    path: list[int] = []
    node = ROOT
    while True:
        children = draft.children(node)
        remaining = target_probs[node + 1]
        here = position + len(path)
        for sibling, child in enumerate(children):
            token, draft_probs = draft.tokens[child], draft.draft_probs[child]
            if noise.accept(float(remaining[token] / draft_probs[token]), here, sibling):
                path.append(child)
                node = child
                break
            remaining = residual(remaining, draft_probs)
        else:
            token = noise.sample(remaining, here)
            return Verdict(path=path, next_token=token, origin=_origin(draft, children))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(target_probs - draft_probs, 0)), [V]: what the draft did not cover.

    Where nothing is left (two equal distributions, a rejection by rounding) the target's own.
    """
    rest = (target_probs - draft_probs).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else target_probs


def block_verify(draft: Draft, target_probs: Tensor, noise: Noise, position: int) -> Verdict:
    """Block verification of a sampled chain: accepts as much as rejection sampling, or more.

    Sun et al. 2024 (arXiv 2403.10444), Algorithm 2. With p_0 = 1 and
    p_i = min(p_{i-1} · target(x_i) / draft(x_i), 1), the *largest* i that passes its test counts:
    a failure in between does not stop the search.

    target_probs: [n + 1, V]. position: of the first token after the newest one.
    """
    assert draft.is_chain
    assert draft.draft_probs is not None
    weight, length, kept = 1.0, 0, 1.0
    for i, token in enumerate(draft.tokens):
        ratio = target_probs[i, token] / draft.draft_probs[i, token]
        weight = min(weight * float(ratio), 1.0)
        if noise.accept(_block_chance(draft, target_probs, i + 1, weight), position + i):
            length, kept = i + 1, weight
    if length == len(draft):
        rest = target_probs[length]
    else:
        rest = residual(kept * target_probs[length], draft.draft_probs[length])
    origin = _origin(draft, draft.children(length - 1))
    token = noise.sample(rest, position + length)
    return Verdict(path=range(length), next_token=token, origin=origin)


def _block_chance(draft: Draft, target_probs: Tensor, i: int, weight: float) -> float:
    """h_i of the paper: the chance that a block of i tokens is long enough."""
    if i == len(draft):
        return weight
    assert draft.draft_probs is not None
    excess = (weight * target_probs[i] - draft.draft_probs[i]).clamp_min(0)
    gain = float(torch.sum(excess))
    return gain / (gain + 1 - weight) if gain > 0 else 0.0


def typical_acceptance(draft: Draft, target_probs: Tensor, noise: Noise, position: int) -> Verdict:
    """Lossy: accept what the target finds probable enough, whoever guessed it.

    Cai et al. 2024 (arXiv 2401.10774), section 2.3.1: a token x stands where all above it do and
    target(x) > min(ε, δ·exp(-H)), H the entropy of the target's distribution there, ε = 0.09 and
    δ = 0.3 as in the authors' code. Of the accepted paths the longest counts, of equals the one
    that is most probable for the target; the token after it is a sample. The output is *not*
    distributed as the target's: improbable tokens become rarer, drafted ones more frequent.

    target_probs: [n + 1, V]. position: of the first token after the newest one.
    """
    best: list[int] = []
    scores, paths = {ROOT: 0.0}, {ROOT: best}
    entropy = torch.special.entr(target_probs).sum(-1)
    least = (_DELTA * torch.exp(-entropy)).clamp_max(_EPSILON)
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        prob = float(target_probs[parent + 1, token])
        if parent not in paths or not prob > float(least[parent + 1]):
            continue
        scores[node] = scores[parent] + math.log(prob)
        paths[node] = [*paths[parent], node]
        end = best[-1] if best else ROOT
        if (len(paths[node]), scores[node]) > (len(best), scores[end]):
            best = paths[node]
    end = best[-1] if best else ROOT
    token = noise.sample(target_probs[end + 1], position + len(best))
    return Verdict(path=best, next_token=token, origin=_origin(draft, draft.children(end)))


def _origin(draft: Draft, untaken: list[int]) -> Origin:
    if not draft:
        return "plain"
    return "recovered" if untaken else "bonus"


REJECTION_SAMPLERS: dict[str, Callable[[Draft, Tensor, Noise, int], Verdict]] = {
    "standard": rejection_sample,
    "block": block_verify,
}
LOSSY_SAMPLERS: dict[str, Callable[[Draft, Tensor, Noise, int], Verdict]] = {
    "typical": typical_acceptance,
}
"""For drafts of any kind; never among the lossless ones."""
