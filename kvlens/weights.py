"""Are weights whole, and how do they become a model?

1. A `.gguf` file is dequantised at each load, a folder and a Hugging Face id go to transformers as they are.
2. Code from a checkpoint is never run, weights that are missing are never made up, and an error says whether the
   file is wrong (exit 2) or this machine lacks something (exit 3).
3. What is slow to find out and depends on files alone (hashes, verdicts) is remembered in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from kvlens.cached import cache_dir
from kvlens.disk import Damaged, read_sealed, write_sealed
from kvlens.errors import EnvironmentLacks, InputError, KvlensError, ModelRefused

WEIGHT_FILES = (".safetensors", ".bin", ".gguf")
# Buffers that older checkpoints keep and that are made anew from the config.
_REMADE = re.compile(r"(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|position_ids)$")


def recall(key: str) -> Any:
    """What was remembered under this key, or None when it is absent or damaged."""
    try:
        return json.loads(read_sealed(cache_dir() / "checks" / key))
    except (OSError, Damaged, ValueError):
        return None


def remember(key: str, value: Any) -> None:
    """Keep `value` for `recall`; a cache folder that cannot be written costs the next load a second, no more."""
    path = cache_dir() / "checks" / key
    with contextlib.suppress(KvlensError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, json.dumps(value).encode())


def stamp(source: Path | str) -> str | None:
    """A hash of path, size and time of the weight files behind a file, a folder or a downloaded id; None if unknown."""
    if isinstance(source, str):
        config = cached_file(source, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
        if config is None:
            return None
        source = Path(config).parent
    files = [source] if source.is_file() else sorted(f for f in source.iterdir() if f.suffix in WEIGHT_FILES)
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers and its hub client show no progress bars and log errors only; all is put back."""
    hub = logging.getLogger("huggingface_hub")  # without a network it tells of every retry
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_level = hub.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            transformers_logging.enable_progress_bar()


def read_gguf(path: Path, options: dict[str, Any]) -> tuple[Any, Any, str]:
    """Model and tokenizer of a GGUF file, weights unpacked, and a note with its most frequent quantisation.

    Raises: InputError when the file is damaged or no language model, EnvironmentLacks when a package is missing.
    Cost: a tenth of a minute for 135M parameters, the metadata being parsed anew by every reader.
    """
    with refusals(str(path), local=True):
        from gguf import GGUFReader

        reader = GGUFReader(path)
        kinds = [tensor.tensor_type.name for tensor in reader.tensors if tensor.tensor_type.name != "F32"]
        splitter = reader.get_field("tokenizer.ggml.pre")
        # weights left in GGUF blocks can be neither saved nor measured in float32; transformers 5.9 unpacks unasked
        gguf_config = getattr(transformers, "GgufConfig", None)
        unpacked = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
        # a bar is drawn while unpacking that no setting turns off
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            hf_model, report = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                output_loading_info=True,
                **options | unpacked,
            )
        _refuse_partial(str(path), hf_model, report)
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if splitter is not None and splitter.contents() == "smollm":
        # the reader leaves out the first of the two splitting steps of these models: every digit by itself
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return hf_model, tokenizer, f"{max(kinds, key=kinds.count)}, dequantised" if kinds else ""


def read_pretrained(source: Path | str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer of a folder (a Path) or a Hugging Face id (a string).

    Raises: InputError for a folder that is no whole model, EnvironmentLacks for an id that cannot be had here,
        ModelRefused for weights that are missing or left over, or a checkpoint that wants its own code run.
    """
    local = isinstance(source, Path)
    if isinstance(source, Path) and not (source / "config.json").is_file():
        raise InputError(
            f"'{source}' is a folder without config.json: no model", "give the folder that holds config.json"
        )
    common = {"local_files_only": local, "trust_remote_code": False}
    with refusals(str(source), local=local), quiet():
        hf_model, report = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **common, **options)
        _refuse_partial(str(source), hf_model, report)
        return hf_model, AutoTokenizer.from_pretrained(source, **common)


@contextlib.contextmanager
def refusals(name: str, *, local: bool) -> Iterator[None]:
    """Within it whatever a reader raises becomes one line that says who must act."""
    try:
        yield
    except KvlensError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise EnvironmentLacks(
            f"'{name}' does not fit into memory", "use a smaller model or --dtype bfloat16"
        ) from error
    except ImportError as error:
        reason = _line(error)
        raise EnvironmentLacks(f"reading '{name}' needs a package: {reason}", "install it beside kvlens") from error
    except Exception as error:  # a config may hold anything, and readers raise anything on it
        reason = _line(error)
        if "can't allocate memory" in reason:  # how torch reports it on a CPU
            raise EnvironmentLacks(f"'{name}' does not fit into memory", "use a smaller model") from error
        if "trust_remote_code" in str(error):
            raise ModelRefused(
                f"'{name}' wants its own code run, which kvlens never does", "use another model"
            ) from error
        if local:
            raise InputError(f"'{name}' cannot be read as a causal LM: {reason}", "is it complete?") from error
        raise EnvironmentLacks(
            f"model '{name}' is not to be had here: {reason}",
            f"check the id and the connection (HF_HUB_OFFLINE is {os.environ.get('HF_HUB_OFFLINE', 'unset')}), "
            "or give a local folder; `kvlens models` lists what is cached",
        ) from error


def _refuse_partial(name: str, hf_model: Any, report: dict[str, Any]) -> None:
    """Refuse a model whose weights are partly made up, and weights that only a part of became the model."""
    missing = sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))
    if missing:
        raise ModelRefused(
            f"'{name}' lacks {len(missing)} weights (first: '{missing[0]}'), which would be random",
            "use a complete checkpoint of a causal LM",
        )
    tied = getattr(hf_model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    unused = sorted(
        key
        for key in map(str, report.get("unexpected_keys", ()))
        if not (_REMADE.search(key) or (tied and key.endswith("lm_head.weight")))
    )
    if unused:
        raise ModelRefused(
            f"'{name}' holds {len(unused)} weights (first: '{unused[0]}') that its config has no place for",
            "the config may name too few layers: use the config.json that came with the weights",
        )


def _line(error: BaseException) -> str:
    """The first line of an error's message, with its class where it says nothing by itself."""
    text = str(error).strip().splitlines()
    return text[0] if text and not isinstance(error, KeyError) else f"{type(error).__name__} {error}".strip()
