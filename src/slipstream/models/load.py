"""From a user's model name to something that runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError
from slipstream.models.sources import resolve, say
from slipstream.models.vocabulary import vocabulary_size
from slipstream.runtimes import Runtime

# transformers imports torchao where it's installed; it reports kernels that nothing here uses.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """vocab_size: ids that the tokenizer knows. eos_token_ids: tokens that end an answer."""

    name: str
    runtime: Runtime
    tokenizer: Any
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def load(model: str, config: RuntimeConfig, *, notify: Callable[[str], None] = say) -> LoadedModel:
    """Load a hub id, a folder, a GGUF file or a built-in name, fetching what is missing.

    notify: told in a line what takes time. Raises SlipstreamError naming what is wrong.
    """
    folder = resolve(model, notify=notify)
    runtime = _runtime(folder, model, config, notify)
    tokenizer = _tokenizer(folder, model)
    return LoadedModel(
        name=model,
        runtime=runtime,
        tokenizer=tokenizer,
        vocab_size=min(vocabulary_size(tokenizer), runtime.vocab_size),
        eos_token_ids=_eos_token_ids(folder, tokenizer),
    )


def _runtime(
    folder: Path, model: str, config: RuntimeConfig, notify: Callable[[str], None]
) -> Runtime:
    """The native runtime on CPUs where it knows the model, else torch and a line that says why."""
    import torch

    on_gpu = config.device == "auto" and torch.cuda.is_available()
    if config.runtime == "native" or (config.runtime == "auto" and not on_gpu):
        from slipstream.runtimes import native

        shape = native.read_config(folder, model)
        reason = native.unsupported(shape, config)
        if reason is None:
            return native.load(folder, name=model, config=config, shape=shape, notify=notify)
        if config.runtime == "native":
            raise SlipstreamError(f"{model}: {reason}; --runtime auto runs it on torch")
        if not config.device.startswith("cuda"):
            notify(f"{model} runs on torch: {reason}")
    from slipstream.runtimes.torch import load as load_torch

    return load_torch(folder, name=model, config=config)


def _tokenizer(folder: Path, model: str) -> Any:
    from slipstream.models import tokenizer

    try:
        return tokenizer.load(folder)
    except Exception as error:  # the libraries raise many kinds for a damaged file
        raise SlipstreamError(
            f"{model}: the tokenizer in {folder} can't be read: {error}"
        ) from error


def _eos_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Of the generation config, else of the model's config, and the tokenizer's own."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids.update([given] if isinstance(given, int) else given or [])
            if ids:
                break
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
