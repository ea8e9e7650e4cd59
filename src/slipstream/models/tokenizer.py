"""A tokenizer that is there at once: the ``tokenizers`` library without transformers around it.

Importing transformers takes longer than reading the default model. Most folders ask for nothing
but their tokenizer.json and a chat template; for those ``LightTokenizer`` answers what generating
text asks, in transformers' words and with its results, and hands any other question to
transformers' own tokenizer, loaded then. Whatever else a folder asks for is left to
``AutoTokenizer`` altogether.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Model types for which AutoTokenizer takes a generic class at its word. For others it may know
# better (qwen2), or look for files of another format first (mistral).
MODEL_TYPES = (
    "cohere2",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "olmo2",
    "phi3",
    "qwen3",
    "smollm3",
)
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_READ_HERE = {
    "added_tokens_decoder",
    "additional_special_tokens",
    "chat_template",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "tokenizer_class",
    *SPECIAL_TOKENS,
}
_WITHOUT_EFFECT = {  # on ids and text; with a tokenizer.json, which has its own say, that is
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "backend",
    "is_local",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "truncation_side",
}


def load(folder: Path) -> Any:
    """The tokenizer of a folder, as AutoTokenizer reads it."""
    return light(folder) or _auto(folder)


def light(folder: Path) -> LightTokenizer | None:
    """None where the folder asks for more than this module is sure to know."""
    if not (folder / "tokenizer.json").is_file() or (folder / "additional_chat_templates").is_dir():
        return None
    model, config = _json(folder / "config.json"), _json(folder / "tokenizer_config.json")
    if (
        model.get("model_type") not in MODEL_TYPES
        or "model_name" in model
        or config.get("tokenizer_class") not in _GENERIC
        or config.keys() - _READ_HERE - _WITHOUT_EFFECT
    ):
        return None
    legacy = ("special_tokens_map.json", "added_tokens.json")
    if "added_tokens_decoder" not in config and any((folder / name).exists() for name in legacy):
        return None
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = _special_tokens(core, config)
    if special is None or core.truncation is not None or core.padding is not None:
        return None
    if config.get("clean_up_tokenization_spaces") and type(core.model).__name__ != "BPE":
        return None
    return LightTokenizer(folder, core, special, _chat_template(folder, config))


class LightTokenizer:
    """special_tokens: by their names, ``eos_token`` and the like."""

    def __init__(
        self,
        folder: Path,
        core: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        self._folder = folder
        self._core = core
        self._special_tokens = special_tokens
        self.chat_template = chat_template
        self.eos_token = special_tokens.get("eos_token")
        self.eos_token_id = None if self.eos_token is None else core.token_to_id(self.eos_token)

    def __call__(self, text: Any, **options: Any) -> Any:
        """{"input_ids": [...]}; with options all that transformers returns."""
        if options or not isinstance(text, str):
            return self._full(text, **options)
        return {"input_ids": self._core.encode(text).ids}

    def encode(self, text: Any, **options: Any) -> Any:
        return self._full.encode(text, **options) if options else self(text)["input_ids"]

    def decode(self, ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        listed = isinstance(ids, Sequence) and all(isinstance(i, int) for i in ids)
        if options or not listed:
            return self._full.decode(ids, skip_special_tokens=skip_special_tokens, **options)
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._core.get_vocab(with_added_tokens=True)
        return vocab

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        from slipstream.models import chat_template  # jinja is for those who chat

        source = self.chat_template
        source = source.get("default") if isinstance(source, dict) else source
        simple = tokenize and not return_dict and not options and isinstance(source, str)
        if simple and chat_template.is_plain(conversation):
            template = chat_template.compiled(source)
            if template is not None:
                text = chat_template.render(
                    template, conversation, self._special_tokens, add_generation_prompt
                )
                return self._core.encode(text, add_special_tokens=False).ids
        if isinstance(self.chat_template, str):  # somebody may have set another one
            options.setdefault("chat_template", self.chat_template)
        return self._full.apply_chat_template(
            conversation,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            return_dict=return_dict,
            **options,
        )

    def __len__(self) -> int:
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        """What is not here is transformers' to answer."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._full, name)

    @cached_property
    def _full(self) -> Any:
        return _auto(self._folder)


def _auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _special_tokens(core: Tokenizer, config: Mapping[str, Any]) -> dict[str, str] | None:
    """The named special tokens; None if the configuration would change those of tokenizer.json."""
    by_id = core.get_added_tokens_decoder()
    known = {token.content: token for token in by_id.values()}
    named = {}
    for name in SPECIAL_TOKENS:
        if config.get(name) is not None:
            content = _content(config[name])
            if content is None or content not in known or not known[content].special:
                return None
            named[name] = content
    both = [config.get(name) for name in ("extra_special_tokens", "additional_special_tokens")]
    extra = both[0] or both[1] or []
    if all(both) or not isinstance(extra, list):  # a dictionary names further tokens
        return None
    if not {_content(value) for value in extra} <= known.keys():
        return None
    for id_, entry in (config.get("added_tokens_decoder") or {}).items():
        ours = by_id.get(int(id_))
        if ours is None or ours.__getstate__() != AddedToken(**entry).__getstate__():
            return None
    return named


def _content(value: Any) -> str | None:
    """The text of a token, which may be written as a dictionary of its properties."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Of a file, else of the configuration: one, or several by name."""
    file = folder / "chat_template.jinja"
    found = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    template: str | dict[str, str] | None = found
    return template


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}
