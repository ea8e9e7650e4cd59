"""The light tokenizer against transformers' own, on every kind of folder that it takes."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_llm
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gguf_tokenizer import BYTE_META, SPM_META
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram, WordLevel, WordPiece
from transformers import AutoTokenizer, TokenizersBackend

from slipstream.models import gguf_tokenizer, tokenizer
from slipstream.models.sources import DEFAULT_MODEL, resolve

EOS, START = "<|eos|>", "<|start|>"
TEXTS = [
    "",
    " ",
    "hello",
    " two  spaces\n\ttab ",
    "naïve café 日本 🙂 e\u0301",
    "12345 it's I 'm , . ! ?",
    f"{START}the train{EOS}{EOS} {START} in <tool> on",
    "<s> hello</s>[UNK]",
    "\u2581under \ufffd",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": f"the train {START} <b>&amp;</b> 'q' 日本"},
    {"role": "assistant", "content": " in on "},
    {"role": "user", "content": "why?"},
]
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": START,
    "eos_token": EOS,
    "chat_template": tiny_llm.TEMPLATE,
}


def bytes_core() -> Tokenizer:
    core = tiny_llm.tokenizer_of().backend_tokenizer
    core.add_tokens([AddedToken("<tool>", lstrip=True, normalized=False)])
    return core


def unigram_core() -> Tokenizer:
    pieces = ["<unk>", START, EOS, "▁", *"helo123,.!?'", "▁hello", "ll"]
    core = Tokenizer(Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens([START, EOS, "<unk>"])
    return core


def wordpiece_core() -> Tokenizer:
    words = ["[UNK]", START, EOS, "hello", "he", "##llo", "the", "train", "in", ",", ".", "?", "'"]
    core = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.add_special_tokens([START, EOS, "[UNK]"])
    return core


def with_bos(core: Tokenizer) -> Tokenizer:
    start = core.token_to_id(START)
    core.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[(START, start)]
    )
    return core


def from_gguf(meta: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    text, config = gguf_tokenizer.build(dict(meta), 512)
    return Tokenizer.from_str(text), config | {"chat_template": tiny_llm.TEMPLATE}


def save(
    folder: Path,
    core: Tokenizer | None = None,
    config: Mapping[str, Any] = CONFIG,
    model: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A folder with a tokenizer; ``files`` lie beside it."""
    folder.mkdir(exist_ok=True)
    (core or bytes_core()).save(str(folder / "tokenizer.json"))
    model = {"model_type": "llama"} if model is None else model
    texts = {
        "tokenizer_config.json": json.dumps(config),
        "config.json": json.dumps(model),
    }
    for name, text in (texts | dict(files or {})).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def compare(folder: Path) -> tokenizer.LightTokenizer:
    """Hold the light tokenizer of a folder against AutoTokenizer."""
    ours, theirs = tokenizer.light(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    assert type(theirs) is TokenizersBackend
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"] == ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    for id_ in range(len(ours)):
        assert ours.decode([id_]) == theirs.decode([id_])
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "return_dict": False}
        assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(
            CHAT, **options
        )
    assert "_full" not in vars(ours)  # none of this asked transformers
    return ours


ADDED = {
    str(id_): {
        key: getattr(token, key)
        for key in ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    }
    for id_, token in bytes_core().get_added_tokens_decoder().items()
}
NAMED = [
    {"name": "default", "template": tiny_llm.TEMPLATE},
    {"name": "rag", "template": "{{ documents[0] }}"},
]
TYPED = {"__type": "AddedToken", "content": START, "lstrip": True, "normalized": False}
TAKEN: dict[str, dict[str, Any]] = {
    "byte level": {},
    "byte level, bos": {"core": with_bos(bytes_core())},
    "unigram": {"core": unigram_core()},
    "unigram, bos": {"core": with_bos(unigram_core())},
    "word pieces": {"core": wordpiece_core()},
    "gguf bytes": dict(zip(("core", "config"), from_gguf(BYTE_META), strict=True)),
    "gguf sentencepiece": dict(zip(("core", "config"), from_gguf(SPM_META), strict=True)),
    "class of transformers 5": {"config": CONFIG | {"tokenizer_class": "TokenizersBackend"}},
    "bos asked for": {"config": CONFIG | {"add_bos_token": True, "add_eos_token": True}},
    "bos not asked for": {
        "core": with_bos(bytes_core()),
        "config": CONFIG | {"add_bos_token": False},
    },
    "prefix space": {"config": CONFIG | {"add_prefix_space": True}},
    "clean-up without effect": {"config": CONFIG | {"clean_up_tokenization_spaces": True}},
    "names and sides": {
        "config": CONFIG
        | {
            "model_max_length": 8,
            "padding_side": "left",
            "truncation_side": "left",
            "model_input_names": ["input_ids"],
            "name_or_path": "somewhere/else",
            "is_local": False,
        }
    },
    "added tokens": {
        "config": CONFIG | {"added_tokens_decoder": ADDED},
        "files": {"special_tokens_map.json": '{"eos_token": "never read"}'},
    },
    "a token as a dictionary": {"config": CONFIG | {"bos_token": TYPED}},
    "further tokens": {"config": CONFIG | {"additional_special_tokens": ["<tool>", "<|end|>"]}},
    "no names": {"config": {k: v for k, v in CONFIG.items() if not k.endswith("_token")}},
    "names of nothing": {"config": CONFIG | {"eos_token": None, "pad_token": None}},
    "template file": {
        "config": CONFIG | {"chat_template": "{{ 'not this' }}"},
        "files": {"chat_template.jinja": tiny_llm.TEMPLATE},
    },
    "named templates": {"config": CONFIG | {"chat_template": NAMED}},
    "old transformers": {"model": {"model_type": "llama", "transformers_version": "4.30.0"}},
}


@pytest.mark.parametrize("case", TAKEN)
def test_results_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    compare(save(tmp_path, **TAKEN[case]))


@pytest.mark.parametrize("pre", gguf_tokenizer.PRE_TOKENIZERS)
@pytest.mark.parametrize("bos", [True, False])
def test_results_for_converted_files_are_those_of_transformers(
    tmp_path: Path, pre: str, bos: bool
) -> None:
    meta = BYTE_META | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": bos}
    compare(save(tmp_path, *from_gguf(meta)))


def test_a_saved_tokenizer_is_taken() -> None:
    compare(tiny_llm.target())


@pytest.mark.parametrize("model_type", tokenizer.MODEL_TYPES)
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_transformers_takes_a_generic_class_at_its_word(
    tmp_path: Path, model_type: str, name: str
) -> None:
    compare(save(tmp_path, None, CONFIG | {"tokenizer_class": name}, {"model_type": model_type}))


@pytest.mark.model
def test_results_for_the_default_model_are_those_of_transformers() -> None:
    ours = compare(resolve(DEFAULT_MODEL))
    theirs = ours._full
    source = Path(tokenizer.__file__).read_text(encoding="utf-8")
    assert ours(source)["input_ids"] == theirs(source)["input_ids"]


BYTES = tiny_llm.target()
OURS, THEIRS = tokenizer.light(BYTES), AutoTokenizer.from_pretrained(BYTES)


@given(st.text() | st.lists(st.sampled_from([*tiny_llm.SPECIAL, " ", "the", ":smile:"])))
def test_any_text_has_the_same_ids(text: str | list[str]) -> None:
    assert OURS is not None
    text = "".join(text)
    assert OURS(text)["input_ids"] == THEIRS(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    assert OURS.apply_chat_template(messages, return_dict=False) == THEIRS.apply_chat_template(
        messages, return_dict=False
    )


@given(st.lists(st.integers(0, 300)))
def test_any_ids_have_the_same_text(ids: list[int]) -> None:
    assert OURS is not None
    for skip in (True, False):
        assert OURS.decode(ids, skip_special_tokens=skip) == THEIRS.decode(
            ids, skip_special_tokens=skip
        )


# What is left to transformers


def truncating() -> Tokenizer:
    core = bytes_core()
    core.enable_truncation(4)
    return core


def padding() -> Tokenizer:
    core = bytes_core()
    core.enable_padding(pad_token=EOS)
    return core


OTHER_TOKEN = ADDED | {"0": ADDED["0"] | {"lstrip": True}}
LEFT: dict[str, dict[str, Any]] = {
    "another class": {"config": CONFIG | {"tokenizer_class": "GPT2Tokenizer"}},
    "no class": {"config": {k: v for k, v in CONFIG.items() if k != "tokenizer_class"}},
    "another model": {"model": {"model_type": "qwen2"}},
    "mistral's own format": {"model": {"model_type": "mistral"}},
    "a model's own name": {"model": {"model_type": "llama", "model_name": "x"}},
    "code of its own": {"config": CONFIG | {"auto_map": {"AutoTokenizer": ["a.B", None]}}},
    "an unknown key": {"config": CONFIG | {"split_special_tokens": True}},
    "a further named token": {"config": CONFIG | {"image_token": "<tool>"}},
    "further named tokens": {"config": CONFIG | {"extra_special_tokens": {"image": "<tool>"}}},
    "clean-up": {
        "core": unigram_core(),
        "config": CONFIG | {"clean_up_tokenization_spaces": True},
    },
    "truncation": {"core": truncating()},
    "padding": {"core": padding()},
    "a new token": {"config": CONFIG | {"pad_token": "<pad>"}},
    "a new further token": {"config": CONFIG | {"additional_special_tokens": ["<new>"]}},
    "a token that becomes special": {"config": CONFIG | {"pad_token": "<tool>"}},
    "an added token that differs": {"config": CONFIG | {"added_tokens_decoder": OTHER_TOKEN}},
    "the old list of names": {"files": {"special_tokens_map.json": '{"pad_token": "<pad>"}'}},
    "templates in a folder": {"files": {"additional_chat_templates/x.jinja": "x"}},
}


@pytest.mark.parametrize("case", LEFT)
def test_what_could_change_results_is_left_to_transformers(tmp_path: Path, case: str) -> None:
    assert tokenizer.light(save(tmp_path, **LEFT[case])) is None


def test_without_a_tokenizer_file_transformers_reads_the_vocabulary(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "hello": 1}
    folder = save(tmp_path, Tokenizer(WordLevel(words, unk_token="[UNK]")))
    (folder / "tokenizer.json").unlink()
    assert tokenizer.light(folder) is None


def test_load_gives_what_auto_tokenizer_gives(tmp_path: Path) -> None:
    folder = save(tmp_path, **LEFT["a new token"])
    found = tokenizer.load(folder)
    assert isinstance(found, TokenizersBackend)
    assert found.pad_token == "<pad>"
    assert isinstance(tokenizer.load(BYTES), tokenizer.LightTokenizer)


def test_other_questions_are_asked_of_transformers(tmp_path: Path) -> None:
    ours = tokenizer.light(save(tmp_path))
    assert ours is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.model_max_length == theirs.model_max_length
    assert ours.convert_ids_to_tokens([5, 6]) == theirs.convert_ids_to_tokens([5, 6])
    batch = ours(["the train", "in"], padding=False)
    assert batch["attention_mask"] == theirs(["the train", "in"])["attention_mask"]
    assert ours.encode("the", add_special_tokens=False) == theirs.encode(
        "the", add_special_tokens=False
    )
    assert ours.decode(torch.tensor([5, 6])) == theirs.decode(torch.tensor([5, 6]))
    assert ours.decode([5, 6], clean_up_tokenization_spaces=True) == theirs.decode(
        [5, 6], clean_up_tokenization_spaces=True
    )
    assert not hasattr(ours, "nothing_like_it")
    assert not hasattr(ours, "_nothing_like_it")


# Chat templates

TEMPLATES = {
    "whitespace": "  {% for m in messages %}\n   {% if 1 %}\n {{ m.content }}\n {% endif %}\n"
    "  {%- endfor %} {# nothing #}\n end\n",
    "carriage returns": "a\r\n{% if true %}\r\n b\r\n{% endif %}\r\n",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.last %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "namespace": "{% set ns = namespace(a=1, self=2) %}{% for m in messages %}"
    "{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}{{ ns.self }}",
    "json": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2, sort_keys=true) }}"
    "{{ {'a': '<日>'} | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "dictionaries": "{{ dict(a=1) }}{{ dict.fromkeys(['a'], 2) }}{{ dict([('x', 3)]) }}",
    "time": "{{ strftime_now('%Y-%m-%d') }}",
    "tools": "{% if tools %}tools{% endif %}{% if documents is none %}none{% endif %}"
    "{{ tools is defined }}{{ builtin_tools is defined }}",
    "prompt": "{{ add_generation_prompt }}",
    "macros": "{% macro f(m) %}[{{ m.role }}{{ caller() }}]{% endmacro %}"
    "{% for m in messages %}{% call f(m) %}{{ m.content | trim | upper }}{% endcall %}{% endfor %}",
    "methods": "{{ messages[0].items() | list }}{{ messages[1].content.split(' ')[-1] }}"
    "{{ messages[0].get('nothing', 'x') }}{{ messages | selectattr('role', 'equalto', 'user') "
    "| map(attribute='content') | join('+') }}",
    "html": "{{ messages[1].content }}{{ messages[1].content | e }}",
    "generation": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "undefined": "{{ nothing }}x",
}
REFUSED = {
    "refusal": ("{{ raise_exception('no system here') }}", "no system here"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "syntax": ("{% for %}", "xpected"),
    "private name": ("{% set n = namespace(_a=1) %}", "underscore"),
    "private name set": ("{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n }}", "underscore"),
    "internals": ("{{ messages.__class__.__mro__ }}", "unsafe|undefined"),
    "internals of dict": ("{{ dict.mro() }}", "no attribute|undefined"),
    "mutation": ("{{ messages.append(1) }}", "unsafe|safely|callable"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, case: str) -> None:
    folder = save(tmp_path, config=CONFIG | {"chat_template": TEMPLATES[case]})
    ours, theirs = tokenizer.light(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for conversation in (CHAT, CHAT[1:], tuple(CHAT)):
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt, "tokenize": True, "return_dict": False}
            expected = theirs.apply_chat_template(conversation, **options)
            assert ours.apply_chat_template(conversation, **options) == expected
    assert ("_full" in vars(ours)) is (case == "generation")


@pytest.mark.parametrize("case", REFUSED)
def test_templates_refuse_as_in_transformers(tmp_path: Path, case: str) -> None:
    source, said = REFUSED[case]
    folder = save(tmp_path, config=CONFIG | {"chat_template": source})
    ours, theirs = tokenizer.light(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    with pytest.raises(Exception, match=said) as expected:
        theirs.apply_chat_template(CHAT, return_dict=False)
    with pytest.raises(expected.type, match=said):
        ours.apply_chat_template(CHAT, return_dict=False)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "x", "thinking": "hm"},
        {"role": "user", "content": 3},
    ],
)
def test_messages_of_more_than_text_are_transformers_business(
    tmp_path: Path, message: dict[str, Any]
) -> None:
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    folder = save(tmp_path, config=CONFIG | {"chat_template": source})
    ours, theirs = tokenizer.light(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    expected = theirs.apply_chat_template([message], return_dict=False)
    assert ours.apply_chat_template([message], return_dict=False) == expected


def test_options_of_a_template_are_transformers_business(tmp_path: Path) -> None:
    folder = save(tmp_path, config=CONFIG | {"chat_template": NAMED})
    ours, theirs = tokenizer.light(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for options in (
        {"tokenize": False},
        {"return_dict": True},
        {"chat_template": "rag", "documents": [{"text": "x"}], "tokenize": False},
        {"tools": [{"name": "f"}], "tokenize": False},
        {"enable_thinking": True, "tokenize": False},
    ):
        assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(
            CHAT, **options
        )
    ours.chat_template = "{{ x }}"  # somebody's own counts everywhere
    assert ours.apply_chat_template(CHAT, x="mine", tokenize=False) == "mine"
    with pytest.raises(ValueError, match="empty conversation"):
        ours.apply_chat_template([], return_dict=False)


def test_chatting_imports_neither_transformers_nor_torch() -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from slipstream.models.tokenizer import load\n"
        "found = load(Path(sys.argv[1]))\n"
        "ids = found.apply_chat_template([{'role': 'user', 'content': 'x'}], return_dict=False)\n"
        "assert found.decode(ids) and found('the')['input_ids'] and found.get_vocab()\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, str(BYTES)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
