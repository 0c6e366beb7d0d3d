"""Tokenizers in written GGUF files: the keys by which llama.cpp makes tokens of text, or why there are none."""

import base64
import json
import random
import struct

import pytest

from bigload.checkpoint.formats.gguf.tokenizer import UnknownTokenizerError, tokenizer_metadata
from bigload.checkpoint.formats.sentencepiece_model import parse_sentencepiece

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")


def split(pattern, **changes):
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **changes}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [rule, bytes_]}


BPE = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": split(QWEN2),
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3},
        "merges": [["a", "b"], ["a ", "b"]],
        "ignore_merges": False,
    },
    "added_tokens": [
        {"id": 4, "content": "<end>", "special": True},
        {"id": 5, "content": "<think>", "special": False},
        {"id": 6, "content": "<|im_start|>", "special": False},
    ],
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    },
}
SETTINGS = {
    "bos_token": {"content": "<|im_start|>"},
    "eos_token": "<end>",
    "pad_token": "<gone>",
    "chat_template": [{"name": "default", "template": "{{ x }}"}, {"name": "tools", "template": "{{ y }}"}],
}


def written(folder, tokenizer=None, settings=None, model=None, **files):
    for name, content in {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if model is not None:
        (folder / "tokenizer.model").write_bytes(model)
    for name, content in files.items():
        (folder / name.replace("_jinja", ".jinja")).write_text(content)
    return folder


def keys(found):
    return {key.removeprefix("tokenizer.").removeprefix("ggml."): value for key, value in found.items()}


def test_a_byte_level_tokenizer_has_tokens_merges_and_the_name_of_its_rule(tmp_path):
    found = keys(tokenizer_metadata(written(tmp_path, BPE, SETTINGS), 8))
    assert found == {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": ["a", "b", "ab", "Ġ", "<end>", "<think>", "<|im_start|>", "[PAD7]"],
        "token_type": [1, 1, 1, 1, 3, 4, 3, 5],
        "merges": ["a b", "aĠ b"],
        "bos_token_id": 6,
        "eos_token_id": 4,
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": "{{ x }}",
        "chat_template.tools": "{{ y }}",
        "chat_templates": ["tools"],
    }


def test_settings_say_what_a_text_begins_with_and_a_file_has_the_template(tmp_path):
    settings = {**SETTINGS, "add_bos_token": False, "add_eos_token": True}
    found = keys(tokenizer_metadata(written(tmp_path, BPE, settings, chat_template_jinja="of the file"), 8))
    assert (found["add_bos_token"], found["add_eos_token"]) == (False, True)
    assert found["chat_template"] == "of the file"


@pytest.mark.parametrize(
    ("rule", "ignores", "name"),
    [
        (split(QWEN2), False, "qwen2"),
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "smaug-bpe"),
        ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, False, "gpt-2"),
    ],
)
def test_rules_have_the_names_of_llama_cpp(tmp_path, rule, ignores, name):
    tokenizer = {**BPE, "pre_tokenizer": rule, "model": {**BPE["model"], "ignore_merges": ignores}}
    assert tokenizer_metadata(written(tmp_path, tokenizer), 8)["tokenizer.ggml.pre"] == name


SPACES = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "content": "▁"}]}
SENTENCES = {
    **BPE,
    "normalizer": SPACES,
    "pre_tokenizer": None,
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "<0x0A>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6},
        "merges": ["a b", "▁ ab"],
    },
    "added_tokens": [
        {"id": 0, "content": "<unk>", "special": True},
        {"id": 7, "content": "▁▁", "special": False},
        {"id": 8, "content": "<s>", "special": True},
    ],
}


def test_without_scores_pieces_are_ranked_by_their_merges(tmp_path):
    found = keys(tokenizer_metadata(written(tmp_path, SENTENCES, {"bos_token": "<s>", "unk_token": "<unk>"}), 9))
    assert (found["model"], found["pre"], found["add_space_prefix"]) == ("llama", "default", True)
    assert found["tokens"] == ["<unk>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "  ", "<s>"]
    assert found["token_type"] == [2, 6, 1, 1, 1, 1, 1, 4, 3]
    assert found["scores"] == [-1000.0, -2.0, -2.0, -2.0, -2.0, 0.0, -1.0, -1000.0, -1000.0]
    assert (found["bos_token_id"], found["unknown_token_id"]) == (8, 0)
    assert "merges" not in found


def number(field, value):
    return bytes([field << 3, value])


def text(field, value):
    return bytes([field << 3 | 2, len(value)]) + value


def sentencepiece(*pieces, kind=2, adds_space=True, table=b""):
    made = [
        text(1, text(1, piece.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + number(3, kind))
        for piece, score, kind in pieces
    ]
    return b"".join(made) + text(2, number(3, kind)) + text(3, text(2, table) + number(3, int(adds_space)))


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x00>", 0.0, 6), ("▁a", -0.5, 1), ("é", -1.5, 1)]


@pytest.mark.parametrize("adds_space", [True, False])
def test_scores_are_those_of_sentencepiece(tmp_path, adds_space):
    model = sentencepiece(*PIECES, adds_space=adds_space)
    decoder = {"5": {"content": "<new>", "special": False}}
    settings = {"bos_token": "<s>", "added_tokens_decoder": decoder}
    found = keys(tokenizer_metadata(written(tmp_path, None, settings, model), 6))
    assert found == {
        "model": "llama",
        "pre": "default",
        "tokens": ["<unk>", "<s>", "<0x00>", "▁a", "é", "<new>"],
        "token_type": [2, 3, 6, 1, 1, 4],
        "scores": [0.0, 0.0, 0.0, -0.5, -1.5, -1000.0],
        "add_space_prefix": adds_space,
        "bos_token_id": 1,
        "add_bos_token": True,
        "add_eos_token": False,
    }


def test_scores_come_from_sentencepiece_where_both_files_are_there(tmp_path):
    found = keys(
        tokenizer_metadata(written(tmp_path, {**SENTENCES, "added_tokens": []}, None, sentencepiece(*PIECES)), 5)
    )
    assert found["scores"] == [0.0, 0.0, 0.0, -0.5, -1.5]


UNKNOWN = {
    "no files": (None, None, "neither tokenizer.json nor tokenizer.model"),
    "a word list": ({**BPE, "model": {"type": "WordPiece"}}, None, "of type 'WordPiece', expected 'BPE'"),
    "another pattern": ({**BPE, "pre_tokenizer": split("x+")}, None, "the pattern that splits text, 'x\\+'"),
    "another rule": ({**BPE, "pre_tokenizer": {"type": "Whitespace"}}, None, "split by \\['Whitespace'\\]"),
    "a normaliser": ({**BPE, "normalizer": {"type": "Lowercase"}}, None, "normalises text by 'Lowercase'"),
    "no merges": ({**BPE, "model": {**BPE["model"], "merges": []}}, None, "no merges"),
    "a bad merge": ({**BPE, "model": {**BPE["model"], "merges": [["a"]]}}, None, "has the merge \\['a'\\]"),
    "a bad number": ({**BPE, "model": {**BPE["model"], "vocab": {"a": "0"}}}, None, "the number '0'"),
    "a bad token": ({**BPE, "added_tokens": [{"id": -1, "content": "x"}]}, None, "the number -1"),
    "too many tokens": ({**BPE, "added_tokens": [{"id": 8, "content": "x"}]}, None, "number 8, and the model has 8"),
    "half a character": ({**BPE, "added_tokens": [{"id": 4, "content": "\ud800"}]}, None, "no UTF-8"),
    "a kind that is none": (None, sentencepiece(("a", 0.0, 9)), "a piece of kind 9"),
    "a unigram model without scores": ({"model": {"type": "Unigram", "vocab": [["a"]]}}, None, "the piece \\['a'\\]"),
    "no SentencePiece": (None, b"IQ== 0\n", "not SentencePiece's"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_has_no_form_in_gguf_is_refused_with_the_reason(tmp_path, case):
    tokenizer, model, said = UNKNOWN[case]
    with pytest.raises(UnknownTokenizerError, match=said):
        tokenizer_metadata(written(tmp_path, tokenizer, None, model), 8)


def test_broken_json_is_refused_with_the_reason(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnknownTokenizerError, match=r"tokenizer\.json: not valid JSON"):
        tokenizer_metadata(tmp_path, 8)


def test_mutated_pieces_raise_value_errors_only():
    raw = sentencepiece(*PIECES)
    num_whole = 0
    for seed in range(3000):
        source, content = random.Random(seed), bytearray(raw)
        for _ in range(source.randint(1, 3)):
            content[source.randrange(len(content))] = source.choice((0, 1, 8, 10, 127, 128, 255, source.randrange(256)))
        try:
            parse_sentencepiece(bytes(content[: source.randint(1, 2 * len(content))]))
            num_whole += 1
        except ValueError:
            pass
    assert 0 < num_whole < 3000


@pytest.mark.parametrize("has_model", [False, True])
def test_a_unigram_model_has_scores_and_its_table_of_characters(tmp_path, has_model):
    table = b"\x04\0\0\0abcd"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    model = {"type": "Unigram", "unk_id": 2, "vocab": [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["a", -1.5]]}
    spaces = {"type": "Metaspace", "prepend_scheme": "always"}
    rule = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]}
    content = {"model": model, "normalizer": normalizer, "pre_tokenizer": rule}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    if has_model:
        (tmp_path / "spiece.model").write_bytes(sentencepiece(*PIECES, kind=1, table=table))
    found = tokenizer_metadata(tmp_path, 5)
    assert found["tokenizer.ggml.model"] == "t5"
    assert found["tokenizer.ggml.remove_extra_whitespaces"] is True
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.precompiled_charsmap"] == struct.pack("<IIQ", 9, 0, 8) + table
    if not has_model:
        assert found["tokenizer.ggml.tokens"] == ["<pad>", "</s>", "<unk>", "a", "[PAD4]"]
        assert found["tokenizer.ggml.scores"][3] == -1.5
        assert found["tokenizer.ggml.token_type"] == [1, 1, 2, 1, 5]
