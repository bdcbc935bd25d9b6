"""Folders, GGUF files and ids that are no model, or not a whole one: which error, which words."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import N_VOCAB, build, llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from kvlens import weights
from kvlens.cached import cache_dir
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused
from kvlens.model import load
from kvlens.weights import quiet, read_gguf, read_pretrained, recall, refusals, remember, stamp

OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(N_VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model on disk."""
    path = tmp_path / "model"
    llama().save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    return path


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """The tiny Llama as an F32 GGUF file with a byte-level tokenizer of its own."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(33 + i) if i < 93 else f"{chr(33 + i - 93)}{chr(33)}" for i in range(N_VOCAB)])
    writer.add_token_merges([f"{chr(33 + i)} {chr(33)}" for i in range(4)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }
    for key, weight in model.state_dict().items():
        parts = key.split(".")
        name = f"{names[parts[-2]]}.weight"
        if "layers" in parts:
            name = f"blk.{parts[2]}.{name}"
        values = weight.float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parts[-2])
        if heads:  # the file keeps rotary pairs side by side
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(name, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_is_read_silently_and_leaves_transformers_settings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hf_model, tokenizer = read_pretrained(folder, OPTIONS)
    assert capfd.readouterr() == ("", "")
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before
    ids = torch.arange(3, 20)[None]
    assert torch.equal(hf_model(input_ids=ids).logits, llama()(input_ids=ids).logits)
    assert tokenizer("w5 w7").input_ids == [5, 7]


def test_quiet_puts_settings_back_after_an_exception() -> None:
    transformers_logging.set_verbosity(logging.INFO)
    try:
        with pytest.raises(ValueError, match="inside"), quiet():
            assert not transformers_logging.is_progress_bar_enabled()
            raise ValueError("inside")
        assert transformers_logging.get_verbosity() == logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"without config\.json"):
        read_pretrained(tmp_path, OPTIONS)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no such kind"}', "{}"])
def test_a_folder_with_a_bad_config_is_no_model(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(InputError, match="cannot be read as a causal LM") as caught:
        read_pretrained(folder, OPTIONS)
    assert "\n" not in caught.value.message


def test_a_folder_without_weights_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_pretrained(folder, OPTIONS)


@pytest.mark.parametrize("n_bytes", [0, 5, 2000, -8])
def test_truncated_weights_are_bad_input(folder: Path, n_bytes: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:n_bytes])
    with pytest.raises(InputError, match="cannot be read"):
        read_pretrained(folder, OPTIONS)


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(InputError, match="cannot be read"):
        read_pretrained(folder, OPTIONS)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"head_dim": 0},
        {"vocab_size": "many"},
        {"vocab_size": -1},
        {"num_hidden_layers": "3"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"rms_norm_eps": "small"},
        {"max_position_embeddings": "long"},
        {"max_position_embeddings": None},
        {"eos_token_id": ["a", None]},
        {"pad_token_id": 4000},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full"},
        {"layer_types": ["other"] * 3},
        {"dtype": "floaty"},
        {"quantization_config": 3},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused_in_one_line(
    folder: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(folder / "cache"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((InputError, ModelRefused)) as caught:
        load(str(folder), device="cpu")
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_tokenizer_config_that_is_no_object_is_bad_input(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="cannot be read as a causal LM"):
        read_pretrained(folder, OPTIONS)


def test_weights_the_config_has_no_place_for_are_refused_but_buffers_are_not(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights_file = folder / "model.safetensors"
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelRefused, match=r"holds 9 weights \(first: 'model\.layers\.2\.input_layernorm"):
        read_pretrained(folder, OPTIONS)
    (folder / "config.json").write_text(json.dumps(config))
    extra = {f"model.layers.0.self_attn.{name}": torch.ones(4) for name in ("rotary_emb.inv_freq", "masked_bias")}
    save_file(load_file(weights_file) | extra, weights_file, metadata={"format": "pt"})
    read_pretrained(folder, OPTIONS)


def test_memory_that_runs_out_is_what_the_environment_lacks() -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("x"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        with pytest.raises(EnvironmentLacks, match="memory"), refusals("big", local=True):
            raise error


def test_missing_weights_are_never_made_up(tmp_path: Path) -> None:
    build(LlamaModel, LlamaConfig(**llama().config.to_dict())).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"lacks 1 weights \(first: 'lm_head.weight'\)"):
        read_pretrained(tmp_path, OPTIONS)


def test_a_folder_without_a_tokenizer_is_not_whole(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_pretrained(folder, OPTIONS)


def test_code_in_a_checkpoint_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "own.py").write_text("import pathlib; pathlib.Path(__file__).with_name('was-run').touch()")
    with pytest.raises(ModelRefused, match="own code"):
        read_pretrained(folder, OPTIONS)
    assert not (folder / "was-run").exists()


def test_an_unknown_id_without_a_network_names_the_way_out() -> None:
    with pytest.raises(EnvironmentLacks, match="nobody/no-such-model") as caught:
        read_pretrained("nobody/no-such-model", OPTIONS)
    assert caught.value.exit_code == 3
    assert "HF_HUB_OFFLINE is 1" in caught.value.hint


def test_a_gguf_file_is_dequantised_to_the_same_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    model = llama(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    write_gguf(path, model)
    hf_model, tokenizer, note = read_gguf(path, OPTIONS)
    assert capfd.readouterr() == ("", "")
    assert note == ""
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(hf_model(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=0)
    assert getattr(hf_model.config, "quantization_config", None) is None
    assert tokenizer.convert_ids_to_tokens(tokenizer("12+3").input_ids) == ["1", "2", "+", "3"]


@pytest.mark.parametrize("n_bytes", [0, 3, 40, 400, -1000])
def test_a_corrupt_gguf_is_bad_input(tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, llama())
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(InputError, match=r"cut\.gguf' cannot be read"):
        read_gguf(path, OPTIONS)


def test_a_gguf_without_its_reader_is_what_the_environment_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EnvironmentLacks, match="needs a package"):
        read_gguf(path, OPTIONS)


def test_the_cache_folder_follows_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x"
    monkeypatch.delenv("KVLENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir().name == "kvlens"
    monkeypatch.setenv("KVLENS_CACHE", "~nosuch-user/x")
    with pytest.raises(EnvironmentLacks, match="leads nowhere"):
        cache_dir()


def test_what_is_remembered_is_recalled_and_damage_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path))
    assert recall("key") is None
    remember("key", {"a": 1.5})
    assert recall("key") == {"a": 1.5}
    (tmp_path / "checks" / "key").write_bytes(b"damaged")
    assert recall("key") is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "file"))
    remember("key", 1)
    assert recall("key") is None


def test_a_stamp_changes_with_the_weight_files(folder: Path) -> None:
    before = stamp(folder)
    assert before == stamp(folder)
    (folder / "README").write_text("no weights")
    assert stamp(folder) == before
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes())
    assert stamp(folder) != before
    assert stamp(file) != before
    assert stamp("nobody/no-such-model") is None


def test_all_errors_fit_a_line(folder: Path) -> None:
    assert weights._line(KeyError("x")) == "KeyError 'x'"
    assert weights._line(EOFError()) == "EOFError"
    assert weights._line(ValueError("one\ntwo")) == "one"
