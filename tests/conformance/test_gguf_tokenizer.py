"""Tokenizers in written GGUF files give transformers, gguf-py and llama.cpp the tokens of the folder's tokenizer."""

import importlib.metadata
import json

import model_types
import pytest
import torch

import bigload
import llama_cpp_server
from gguf_files import write_gguf

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's not sure that they'll make it. 'RE YOU SURE? 1234567 3.14",
    "def f(x):\n    return [x, x + 1]  # a comment\n\n\n\tdef g(): pass\n",
    "私は猫です。日本語 한국어 тест здравствуй мир ÀÉ 🚀🦙 ...!!! ''''",
] * 20
TEXTS = [
    *CORPUS[:3],
    "Hello world",
    "two  spaces\n\nand\tlines ",
    "<|start|>user<think>hm</think><|end|>",
    "emoji 👩‍👩‍👧 zwj \u0301",
    "a",
]
ROWS = 1100


def split(name):
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    pattern = tokenizers.Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name])
    before = tokenizers.pre_tokenizers
    return before.Sequence(
        [before.Split(pattern, behavior="isolated"), before.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def byte_level(rule, *, ignore_merges=False, has_start=False):
    """Return a tokenizer trained on the corpus, of the form of a family."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = rule
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    return finished(made, has_start=has_start)


def spaced():
    """Return a tokenizer of the form of Llama 2: bytes for what is unknown, a space in front."""
    model = tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    forms = tokenizers.normalizers
    made.normalizer = forms.Sequence([forms.Prepend("▁"), forms.Replace(" ", "▁")])
    parts = tokenizers.decoders
    made.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(vocab_size=900, special_tokens=special))
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:1]  # bytes are pieces, not found in the text
    return finished(tokenizers.Tokenizer.from_str(json.dumps(content)), has_start=True)


def unigram():
    """Return a tokenizer of the form of T5."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    before = tokenizers.pre_tokenizers
    made.pre_tokenizer = before.Sequence([before.WhitespaceSplit(), before.Metaspace()])
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return finished(made, has_start=False)


def finished(made, *, has_start):
    added = [tokenizers.AddedToken(text, special=True, normalized=False) for text in ("<|start|>", "<|end|>")]
    made.add_special_tokens(added)
    made.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    if has_start:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", made.token_to_id("<|start|>"))]
        )
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


CASES = {
    "gpt-2": lambda: byte_level(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen2": lambda: byte_level(split("qwen2")),
    "llama-bpe": lambda: byte_level(split("llama-bpe"), ignore_merges=True, has_start=True),
    "tekken": lambda: byte_level(split("tekken"), ignore_merges=True, has_start=True),
    "gpt-4o": lambda: byte_level(split("gpt-4o")),
    "default": spaced,
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The name of a rule, a folder with a tokenizer of it, and what was written of it, alone in a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=ROWS, max_position_embeddings=128, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "in")
    tokenizer = CASES[request.param]()
    tokenizer.chat_template = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(folder / "in")
    bigload.reshard(folder / "in", folder / "out", layout="gguf", dtype="fp16")
    (folder / "alone").mkdir()
    (folder / "out" / "model.gguf").rename(folder / "alone" / "model.gguf")
    return request.param, folder / "in", folder / "alone"


def texts_for(name):
    """Return texts; of SentencePiece those without added tokens, after which readers differ in putting a space."""
    return [text for text in TEXTS if name != "default" or "<" not in text]


reads_right = pytest.mark.skipif(
    model_types.release(transformers) < (5, 23), reason="transformers before 5.23 misreads tokenizers of GGUF files"
)


@reads_right
def test_transformers_reads_the_tokenizer_from_the_file(case):
    name, folder, alone = case
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    found = transformers.AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf")
    for text in texts_for(name):
        assert found(text).input_ids == expected(text).input_ids
    assert found.bos_token_id == expected.bos_token_id
    assert found.eos_token_id == expected.eos_token_id
    messages = [{"role": "user", "content": "Hello"}]
    assert found.apply_chat_template(messages, tokenize=False) == "<|start|>Hello<|end|>"
    model = transformers.AutoModelForCausalLM.from_pretrained(alone, gguf_file="model.gguf")
    assert model.config.vocab_size == ROWS


def test_the_package_reads_the_keys_that_it_would_write(case):
    name, folder, alone = case
    fields = gguf.GGUFReader(alone / "model.gguf").fields
    special = gguf.SpecialVocab(folder, load_merges=name != "default")
    assert fields["tokenizer.ggml.pre"].contents() == name
    assert len(fields["tokenizer.ggml.tokens"].contents()) == ROWS
    for key, number in special.special_token_ids.items():
        stored = {"pad": "padding", "unk": "unknown"}.get(key, key)
        assert fields[f"tokenizer.ggml.{stored}_token_id"].contents() == number
    assert fields["tokenizer.chat_template"].contents() == special.chat_template
    for key, is_added in special.add_special_token.items():
        assert fields[f"tokenizer.ggml.add_{key}_token"].contents() == is_added
    if name != "default":
        assert fields["tokenizer.ggml.merges"].contents() == special.merges


@reads_right
def test_a_reshard_of_the_file_alone_writes_the_tokenizer(case, tmp_path):
    name, folder, alone = case
    report = bigload.reshard(alone / "model.gguf", tmp_path / "back", dtype="bf16")
    assert report.output.notes[-1] == "the tokenizer is that of the GGUF file, as transformers reads it"
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= report.output.documents.keys()
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in texts_for(name):
        assert found(text).input_ids == expected(text).input_ids
    assert found.chat_template == expected.chat_template


def test_a_transformers_that_misreads_tokenizers_is_not_asked(case, tmp_path, monkeypatch):
    _, _, alone = case
    version = importlib.metadata.version
    old = {"transformers": "5.22.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda package: old.get(package) or version(package))
    report = bigload.reshard(alone / "model.gguf", tmp_path / "back", dtype="bf16")
    (note,) = [note for note in report.output.notes if note.startswith("the tokenizer stays in the GGUF file")]
    assert "transformers 5.22.2 reads other tokens from some files, 5.23 does not" in note
    assert "tokenizer.json" not in report.output.documents


def test_llama_cpp_finds_the_tokens_of_a_unigram_model(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=ROWS, max_position_embeddings=128, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
    tokenizer = unigram()
    tokenizer.save_pretrained(tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    texts = [text for text in TEXTS if not {"<", "\n"} & set(text)]  # a table of characters makes spaces of line ends
    found, _ = llama_cpp_server.ask(tmp_path / "out/model.gguf", texts)
    assert found == [tokenizer(text).input_ids for text in texts]
    assert len(set(map(len, found))) > 3


@reads_right
def test_what_transformers_does_not_read_stays_in_the_file_with_the_reason(tmp_path):
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "words"}
    write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (0, (1, 4))}, metadata)
    (note,) = bigload.reshard(tmp_path / "m.gguf", tmp_path / "out").output.notes
    assert note.startswith("the tokenizer stays in the GGUF file")
    assert "transformers does not read it" in note


def test_a_file_in_another_type_gives_llama_cpp_the_same_tokens(case, tmp_path):
    name, folder, alone = case
    bigload.reshard(alone / "model.gguf", tmp_path / "q8", layout="gguf", dtype="q8_0")
    texts = texts_for(name)
    found, _ = llama_cpp_server.ask(tmp_path / "q8" / "model.gguf", texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert found == [tokenizer(text).input_ids for text in texts]
    ours, theirs = (gguf.GGUFReader(each / "model.gguf").fields for each in (tmp_path / "q8", alone))
    assert ours.keys() == theirs.keys()
    changed = {key for key in theirs if ours[key].contents() != theirs[key].contents()}
    assert changed <= {"general.file_type", "general.alignment", "GGUF.tensor_count", "GGUF.kv_count"}
    assert ours["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0


def test_llama_cpp_finds_the_same_tokens_and_answers_as_transformers(case):
    name, folder, alone = case
    texts = texts_for(name)
    found, answer = llama_cpp_server.ask(alone / "model.gguf", texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert found == [tokenizer(text).input_ids for text in texts]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(texts[0], return_tensors="pt").input_ids
    whole = model.generate(prompt, max_new_tokens=8, do_sample=False)[0]
    assert answer == tokenizer.decode(whole[prompt.shape[1] :], skip_special_tokens=True)
