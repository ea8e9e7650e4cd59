"""Builds ``tokenizer.json`` and ``tokenizer_config.json`` from the metadata of a GGUF file.

Two kinds are covered: byte-level BPE (``tokenizer.ggml.model`` "gpt2") and SentencePiece BPE
with byte fallback ("llama").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Token types of the GGUF format.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SPACE = "\u2581"  # SentencePiece writes a space as this character

# Where the text is cut before merging. The two patterns differ in how many digits stay together.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "qwen2": _CUT % r"\p{N}",
    "deepseek-r1-qwen": _CUT % r"\p{N}",
    "llama-bpe": _CUT % r"\p{N}{1,3}",
}
PRE_TOKENIZERS = ("gpt-2", "smollm", *SPLITS)


def build(meta: dict[str, Any], context_length: int) -> tuple[str, dict[str, Any]]:
    """``(tokenizer.json text, tokenizer_config.json)`` for a GGUF's metadata.

    ``context_length`` is in tokens. Raises SlipstreamError for a tokenizer kind or pre-tokenizer
    that isn't known, or for a vocabulary that doesn't fit together; the message doesn't name the
    file, the caller does.
    """
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise SlipstreamError(
            f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE), "
            f"'llama' (SentencePiece BPE)"
        )
    tokens: list[str] = meta.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise SlipstreamError("tokenizer.ggml.tokens is missing or empty")
    types = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise SlipstreamError(f"{len(tokens)} tokens but {len(types)} token types")
    special = special_ids(meta, len(tokens))
    try:
        tokenizer = _byte_level(meta, tokens) if kind == "gpt2" else _pieces(meta, tokens, types)
        tokenizer.add_tokens(_added(tokens, types, special))
    except SlipstreamError:
        raise
    except Exception as err:  # the tokenizers package raises plain Exception
        raise SlipstreamError(f"the tokenizer can't be built ({err})") from err
    _post_process(tokenizer, meta, kind, tokens, special)
    return tokenizer.to_str(), _config(meta, tokens, special, context_length)


def special_ids(meta: dict[str, Any], vocab: int) -> dict[str, int]:
    """The ids the metadata names, by role: bos, eos, unk, pad, eot, eom (those present)."""
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}
    roles["eom"] = "eom"
    found = {}
    for role, word in roles.items():
        index = meta.get(f"tokenizer.ggml.{word}_token_id")
        if index is None or index == 0xFFFFFFFF:  # some writers store "none" as -1
            continue
        if not 0 <= index < vocab:
            raise SlipstreamError(f"{word}_token_id is {index}, the vocabulary has {vocab} tokens")
        found[role] = index
    return found


def eos_ids(special: dict[str, int]) -> list[int]:
    """Every id that ends an answer, eos first."""
    return list(dict.fromkeys(special[r] for r in ("eos", "eot", "eom") if r in special))


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocab[t] != i)
        raise SlipstreamError(f"token {twice!r} is in the vocabulary twice")
    return vocab


def _byte_level(meta: dict[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = meta.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise SlipstreamError(
            f"tokenizer.ggml.pre is {pre!r}; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or []]
    if any(len(merge) != 2 for merge in merges):
        raise SlipstreamError("tokenizer.ggml.merges has an entry that isn't a pair")
    bpe = models.BPE(_vocab(tokens), merges, fuse_unk=False, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
        if "qwen" in pre:
            tokenizer.normalizer = normalizers.NFC()
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, words] if pre == "smollm" else [words]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(meta: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = meta.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise SlipstreamError(f"{len(tokens)} tokens but {len(scores)} scores")
    vocab = _vocab(tokens)
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    merges = _merges(vocab, scores, types)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    to_space = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_space
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: each way to cut a piece in two known pieces,
    best score first (SentencePiece joins the pair whose joined piece scores best)."""
    found = []
    for piece, index in vocab.items():
        if types[index] != NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right, piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _added(tokens: list[str], types: list[int], special: dict[str, int]) -> list[AddedToken]:
    """Tokens found in the text as they are. Only the special ones vanish when decoded."""
    from tokenizers import AddedToken

    hidden = set(special.values())
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (UNKNOWN, CONTROL) or (kind != USER_DEFINED and index in hidden):
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    return added


def _post_process(
    tokenizer: Tokenizer,
    meta: dict[str, Any],
    kind: str,
    tokens: list[str],
    special: dict[str, int],
) -> None:
    """Put bos (and eos, when the file asks for it) around an encoded text."""
    from tokenizers import processors

    # llama.cpp's defaults when the file doesn't say.
    starts = kind == "llama" or meta.get("tokenizer.ggml.pre") == "llama-bpe"
    before = ["bos"] if meta.get("tokenizer.ggml.add_bos_token", starts) else []
    after = ["eos"] if meta.get("tokenizer.ggml.add_eos_token", False) else []
    used = [role for role in before + after if role in special]
    if not used:
        return
    head = [tokens[special[r]] for r in before if r in special]
    tail = [tokens[special[r]] for r in after if r in special]
    one = [*head, "$A", *tail]
    two = [f"{item}:1" for item in [*head, "$B", *tail]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=one, pair=one + two, special_tokens=[(tokens[special[r]], special[r]) for r in used]
    )


def _config(
    meta: dict[str, Any], tokens: list[str], special: dict[str, int], context_length: int
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    for role in ("bos", "eos", "unk", "pad"):
        if role in special:
            config[f"{role}_token"] = tokens[special[role]]
    template = meta.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config
