"""Where draft heads come from: the package, a folder, a hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.models.sources import HUB_FILES, HUB_ID, PATH_STARTS, Notify, hub_folder, say

HEAD_METHODS = ("eagle3", "eagle", "medusa")
OWN_HEADS = Path(__file__).parent.parent / "heads"
_FILES = [*HUB_FILES, "medusa_lm_head.pt", "pytorch_model.bin"]  # pickled ones are read too


def default_config(model: str) -> list[dict[str, Any]]:
    """What drafts unless the user says otherwise: the text itself, and the head that we ship."""
    if not own_head(model, "eagle3"):
        return [{"method": "ngram"}]
    # matches of a single token are left to the head, which guesses better
    return [{"method": "ngram", "prompt_lookup_min": 2}, {"method": "eagle3"}]


def own_head(model: str, method: str) -> str:
    """The name of the head that we ship for a model; "" if there is none."""
    name = f"{model}-{method}"
    known = re.fullmatch(r"[\w.-]+", name) and (OWN_HEADS / name / "config.json").is_file()
    return name if known else ""


def head_for(model: str, method: str) -> str:
    """``own_head``, or SlipstreamError."""
    head = own_head(model, method)
    if not head:
        raise SlipstreamError(
            f"there is no built-in {method} head for {model}: name one (--draft-model, or the "
            f"option model), or make one with slipstream train"
        )
    return head


def find_head(name: str) -> Path | None:
    """The folder of that name, or of one of our heads; None for what is fetched. Refuses a wrong
    name at once."""
    own = sorted(path.parent for path in OWN_HEADS.glob("*/config.json"))
    path = next((head for head in own if head.name == name), Path(name).expanduser())
    if path.is_dir():
        return path
    if name.startswith(PATH_STARTS) or not HUB_ID.fullmatch(name):
        raise SlipstreamError(
            f"no draft head {name!r}: it is no folder here, and a hub id has the form org/name. "
            f"Built in are {', '.join(head.name for head in own)}"
        )
    return None


def resolve_head(name: str, *, notify: Notify = say) -> Path:
    """The local folder of a draft head: one of ours by its name, a folder, or a hub id."""
    return find_head(name) or hub_folder(name, notify, _FILES)
