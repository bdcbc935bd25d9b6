"""Loading by name: what each form of `-m` gives or refuses, and what a load leaves behind."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weights import word_tokenizer, write_gguf
from tiny import FAMILIES, gpt2, llama, token_ids
from transformers import LlamaModel

from kvlens import causal_lm, selfcheck
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused
from kvlens.model import Model, check_ids, learned_positions, load, logits, wrap


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(folder: Path, family: str = "llama") -> Path:
    FAMILIES[family]().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_from_a_folder_checked(cache: Path, tmp_path: Path, family: str) -> None:
    folder = save(tmp_path / "model", family)
    model = load(str(folder), device="cpu")
    assert model.check is not None
    assert model.check.mask_ok
    assert (model.name, model.note, model.attention, model.dtype) == (str(folder), "", "sdpa", torch.float32)
    with torch.no_grad():
        ids = token_ids(12)
        assert torch.allclose(logits(model, ids), FAMILIES[family]()(input_ids=ids).logits, atol=1e-5)
    assert dataclasses.replace(model, name="x").fingerprint == wrap(FAMILIES[family]()).fingerprint


def test_a_second_load_hashes_and_checks_nothing_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "model")
    first = load(str(folder), device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(causal_lm, "_weights_hash", lambda *_: pytest.fail("hashed again"))
        patch.setattr(selfcheck, "self_check", lambda _: pytest.fail("checked again"))
        second = load(str(folder), device="cpu")
    assert (second.fingerprint, second.check) == (first.fingerprint, first.check)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(str(folder), device="cpu").fingerprint != first.fingerprint


def test_a_read_only_cache_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "file"))
    assert load(str(save(tmp_path / "model")), device="cpu").check is not None


def test_a_gguf_file_loads(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama())
    model = load(str(path), device="cpu")
    assert model.check is not None
    assert model.n_layers == 3


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "/nowhere/at/all",
        "~/nowhere-at-all",
        "~nosuch-user/x",
        "a/b/c",
        "no.gguf",
        "",
        "a b",
        "../nowhere-at-all",
    ],
)
def test_a_path_that_leads_nowhere_is_bad_input(cache: Path, name: str) -> None:
    with pytest.raises(InputError, match="no such model") as caught:
        load(name, device="cpu")
    assert caught.value.exit_code == 2


def test_a_file_that_is_no_gguf_and_a_folder_that_is_no_model_are_bad_input(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    with pytest.raises(InputError, match=r"no \.gguf file"):
        load(str(tmp_path / "model.txt"), device="cpu")
    with pytest.raises(InputError, match=r"without config\.json"):
        load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model", "smollm2-136m"])
def test_an_unknown_id_is_what_the_environment_lacks(cache: Path, name: str) -> None:
    with pytest.raises(EnvironmentLacks, match="is not to be had here") as caught:
        load(name, device="cpu")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_every_time(cache: Path, tmp_path: Path, bad: float) -> None:
    folder = save(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"][3, 1] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(ModelRefused, match=r"model\.layers\.0\.self_attn\.v_proj\.weight") as caught:
            load(str(folder), device="cpu")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "mps"}, "not supported"),
        ({"device": "cpu", "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "cpu", "attention": "magic"}, "unknown attention backend 'magic'"),
    ],
)
def test_unknown_options_are_bad_input(cache: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load("nowhere", **options)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), None, LlamaModel(llama().config)], ids=repr)
def test_what_is_no_causal_lm_is_not_wrapped(thing: object) -> None:
    with pytest.raises(InputError, match="no causal LM"):
        wrap(thing)


def test_learned_positions_end_and_computed_ones_do_not() -> None:
    assert learned_positions(wrap(gpt2(n_positions=40))) == 40
    assert learned_positions(wrap(llama())) is None


def test_a_token_without_an_embedding_is_refused() -> None:
    model = wrap(llama())
    check_ids(model, range(model.d_vocab))
    for bad in (model.d_vocab, -1):
        with pytest.raises(InputError, match=f"token {bad} is outside"):
            check_ids(model, [0, bad])


def test_a_gpu_that_is_not_there_and_backends_without_one_are_lacks(cache: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="no such GPU"):
        load("nowhere", device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(EnvironmentLacks, match="CUDA GPU"):
        load("nowhere", device="cpu", attention="flash_attention_2")
    with pytest.raises(EnvironmentLacks, match="CUDA GPU"):
        load("nowhere", device="cpu", attention="flex_attention")


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_dtype_and_backend_are_what_was_asked_for(
    cache: Path, tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    model = load(str(save(tmp_path / "model")), device="cpu", dtype=dtype, attention="eager", check=False)
    assert (model.dtype, model.attention, model.check) == (expected, "eager", None)


def test_loading_says_nothing_and_warns_of_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    script = f"from kvlens.model import load; load({str(folder)!r}, device='cpu')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=None,
        cwd=Path(causal_lm.__file__).parents[1],
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.real
def test_the_default_model_is_the_one_the_contract_names(smollm2: Model) -> None:
    assert (smollm2.name, smollm2.note) == ("smollm2-135m", "Q4_1, dequantised")
    assert (smollm2.n_layers, smollm2.n_heads, smollm2.n_kv_heads, smollm2.d_head) == (30, 9, 3, 64)
    assert (smollm2.d_model, smollm2.d_vocab, smollm2.max_context) == (576, 49152, 8192)
    assert smollm2.hf.generation_config.eos_token_id == 2
    assert smollm2.check is not None
    assert smollm2.check.mask_ok


@pytest.mark.real
def test_the_default_models_tokenizer_splits_as_it_was_trained(smollm2: Model) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.tokenize("x = 12\n\n1  2") == ["x", "Ġ=", "Ġ", "1", "2", "ĊĊ", "1", "ĠĠ", "2"]
    assert tokenizer("Hello").input_ids == [19556]  # no BOS of its own accord
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2


@pytest.mark.real
def test_the_default_model_knows_a_capital(smollm2: Model) -> None:
    ids = torch.tensor([smollm2.tokenizer("The capital of France is").input_ids])
    with torch.no_grad():
        best = int(logits(smollm2, ids, last=1).argmax())
    assert smollm2.tokenizer.decode([best]) == " Paris"


@pytest.mark.real
def test_the_default_model_reloads_in_seconds(smollm2: Model) -> None:
    start = time.perf_counter()
    again = load("smollm2-135m", device="cpu", dtype="float32")
    assert time.perf_counter() - start < 15
    assert again.fingerprint == smollm2.fingerprint
