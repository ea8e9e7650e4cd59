"""Chat templates, rendered as transformers renders them, without importing it.

Templates come with a model and are untrusted: they run in jinja's immutable sandbox, with nothing
but text, and with a ``dict`` and a ``namespace`` that reach no internals of Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

# transformers copies a message's thoughts from one of these names to the others
_THOUGHTS = {"reasoning_content", "thinking", "reasoning"}


@lru_cache
def compiled(source: str) -> Template | None:
    """A template ready to render; None for one that uses words only transformers knows.

    Such a word (``generation``, say) is a syntax error here; so is a mistake in the template, and
    transformers is the one to say so.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=_Namespace,
    )
    try:
        return environment.from_string(source)
    except TemplateSyntaxError:
        return None


def render(
    template: Template,
    messages: Sequence[Mapping[str, str]],
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """special_tokens: by their names in the template, ``bos_token`` and the like."""
    return template.render(
        messages=[dict(message) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **special_tokens,
    )


def is_plain(conversation: object) -> bool:
    """True for messages of nothing but text, which transformers hands to the template unchanged."""
    return (
        isinstance(conversation, Sequence)
        and bool(conversation)
        and all(
            isinstance(message, Mapping)
            and not _THOUGHTS & message.keys()
            and all(type(key) is type(value) is str for key, value in message.items())
            for message in conversation
        )
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own escapes HTML, which is no business of a prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dict:
    """The ``dict`` of a template: makes one, and has no attributes to climb along."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that an attribute may be named self
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace: {name!r}"
        )
