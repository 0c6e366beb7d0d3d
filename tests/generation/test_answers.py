"""Answers are those of transformers' own `generate` in memory, and arrive in pieces that make up the whole."""

import random
import sys

import pytest
import torch
from text_models import save_model, save_tokenizer

import tiny_models
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import MissingPackageError, OptionError
from bigload.generation.folder_tokenizer import FolderTokenizer
from bigload.generation.planned_model import PlannedModel
from bigload.generation.prompts import ChatMessage, Prompt, chosen_context, read_prompts, room_for_answer
from bigload.generation.report import Finish
from bigload.generation.text_generator import Sampling, TextGenerator
from bigload.generation.text_pieces import TextPieces
from builders import write_shard

FAMILIES = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "MixtralForCausalLM",
    "Gemma2ForCausalLM",
    "MambaForCausalLM",
    "T5ForConditionalGeneration",
]
PROMPT = list(range(3, 15))


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def talker(tmp_path_factory, transformers):
    folder = tmp_path_factory.mktemp("talker")
    save_model(folder)
    save_tokenizer(folder)
    return folder


def generator_of(folder, plan=None, **options):
    planned = PlannedModel.open(folder, plan, asked_by="run", keeps_cache=True, resident_bytes=0)
    return TextGenerator(planned, planned.dispatched(), **{"sampling": Sampling(), **options})


def plain_answer(transformers, folder, tokens, **options):
    """Return what transformers generates in memory, less the prompt."""
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, name).from_pretrained(folder).eval()
    found = model.generate(torch.tensor([tokens]), **options)[0].tolist()
    return found[1:] if model.config.is_encoder_decoder else found[len(tokens) :]


@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers_in_memory(transformers, tmp_path, family):
    tiny_models.make(transformers, family).save_pretrained(tmp_path)
    generator = generator_of(tmp_path, decode=str, keeps_cache=True)
    for tokens in (PROMPT, PROMPT[:5], [*PROMPT, *PROMPT]):  # whatever the cache of the one before still holds
        answer = generator.answer(tokens, max_new_tokens=9)
        assert list(answer.tokens) == plain_answer(transformers, tmp_path, tokens, max_new_tokens=9, do_sample=False)


@pytest.mark.peers
def test_a_long_prompt_is_read_in_chunks_with_the_same_answer(transformers, tmp_path, monkeypatch):
    save_model(tmp_path)
    monkeypatch.setattr("bigload.generation.text_generator.PREFILL_CHUNK", 8)
    generator = generator_of(tmp_path, decode=str, measures=True)
    answer = generator.answer(PROMPT * 3, max_new_tokens=4)
    assert list(answer.tokens) == plain_answer(transformers, tmp_path, PROMPT * 3, max_new_tokens=4, do_sample=False)
    assert len(answer.forwards) == 5 + 3  # 36 tokens by 8, and one forward for each token after the first


@pytest.mark.peers
def test_sampled_answers_with_a_seed_are_those_of_transformers(transformers, talker):
    generator = generator_of(talker, decode=str, sampling=Sampling(temperature=0.8, top_p=0.9, seed=7))
    answer = generator.answer(PROMPT, max_new_tokens=20)
    torch.manual_seed(7)
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    assert list(answer.tokens) == plain_answer(transformers, talker, PROMPT, **options)


@pytest.mark.peers
def test_the_generation_config_of_the_folder_decides_unless_asked_otherwise(transformers, tmp_path):
    save_model(tmp_path)
    said = transformers.GenerationConfig(do_sample=True, temperature=5.0, num_beams=3, eos_token_id=508)
    said.save_pretrained(tmp_path)
    assert generator_of(tmp_path, sampling=Sampling()).seed is not None
    assert generator_of(tmp_path, sampling=Sampling(temperature=0)).seed is None


@pytest.mark.peers
def test_a_conversation_goes_on_from_the_cache_as_far_as_it_is_the_same(talker, transformers):
    def fresh(tokens):
        return generator_of(talker, decode=str).answer(tokens, max_new_tokens=6).tokens

    generator = generator_of(talker, decode=str, keeps_cache=True)
    first = generator.answer(PROMPT, max_new_tokens=6)
    whole = [*PROMPT, *first.tokens, 7, 8, 9]
    second = generator.answer(whole, max_new_tokens=6)
    assert (first.cached_tokens, second.cached_tokens) == (0, len(PROMPT) + 5)
    assert second.tokens == fresh(whole)
    other = [*PROMPT, 20, 21]
    third = generator.answer(other, max_new_tokens=6)
    assert third.cached_tokens == len(PROMPT)
    assert third.tokens == fresh(other)
    is_stopped = iter([False, True]).__next__
    fourth = generator.answer(whole, max_new_tokens=6, is_stopped=is_stopped)
    assert (fourth.finish, fourth.tokens) == (Finish.STOPPED, second.tokens[:2])
    assert generator.answer(whole, max_new_tokens=6).tokens == second.tokens


@pytest.mark.peers
def test_pieces_of_text_make_up_the_text_of_the_whole_answer(talker):
    tokenizer = FolderTokenizer.of(open_checkpoint(talker), asked_by="run")
    pieces = []
    generator = generator_of(talker, decode=tokenizer.decode, sampling=Sampling(temperature=5.0, seed=3))
    answer = generator.answer(PROMPT, max_new_tokens=100, on_text=pieces.append)
    assert "".join(pieces) == answer.text == tokenizer.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert len(pieces) > 10


def test_characters_come_whole_and_what_is_none_comes_in_the_end():
    words = "naïve 東京 🙂 größer".encode()
    pieces = TextPieces(lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    shown = [pieces.add(byte) for byte in words]
    assert "".join(shown) == words.decode()
    assert [piece for piece in shown if len(piece) > 1] == []
    assert (pieces.add(0xF0), pieces.add(0x9F)) == ("", "")
    assert pieces.end() == b"\xf0\x9f".decode("utf-8", "replace")


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_those_of_the_whole_where_a_token_reads_by_its_neighbour(seed):
    draw = random.Random(seed)
    tokens = [draw.choice([0x20, 0x61, 0xC3, 0xA4, 0xF0]) for _ in range(200)]

    def decode(given):  # the blank at the beginning is left out, as by sentencepiece
        return bytes(given).decode("utf-8", "replace").removeprefix(" ")

    pieces = TextPieces(decode)
    shown = [*map(pieces.add, tokens), pieces.end()]
    assert "".join(shown) == pieces.text
    assert len(pieces.text) >= 0.9 * len(decode(tokens))


# Prompts


def test_lines_of_a_file_are_prompts():
    lines = ['{"prompt": "a", "id": 3, "more": 1}', "", '{"messages": [{"role": "user", "content": "b"}]}']
    assert read_prompts(lines, source="file") == [
        Prompt(text="a", label=3, line=1),
        Prompt(messages=(ChatMessage(role="user", content="b"),), line=3),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "{}",
        '{"prompt": ""}',
        '{"prompt": null}',
        '{"prompt": "a", "messages": []}',
        '{"messages": []}',
        '{"messages": ["a"]}',
        '{"messages": [{"role": "user", "content": 1}]}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(line):
    with pytest.raises(OptionError, match="line 2 of file is no prompt"):
        read_prompts(['{"prompt": "a"}', line], source="file")


def test_all_lines_that_are_no_prompts_are_named():
    with pytest.raises(OptionError, match="line 1 of file is no prompt") as refused:
        read_prompts(["{}", '{"prompt": "a"}', "", "no json"], source="file")
    assert [detail.partition(" is none")[0] for detail in refused.value.details] == ["line 4"]


def test_a_file_without_prompts_is_refused():
    with pytest.raises(OptionError, match="has no prompts"):
        read_prompts(["", " "], source="file")


@pytest.mark.parametrize(
    ("asked", "planned", "trained", "context"),
    [(None, 0, None, 4096), (None, 0, 512, 512), (None, 9000, 8000, 9000), (64, 100, 512, 64), (512, 0, 512, 512)],
)
def test_the_context_is_that_asked_for_or_planned_or_usual(asked, planned, trained, context):
    assert chosen_context(asked, planned=planned, trained=trained) == context


def test_an_answer_has_the_room_that_is_left_or_what_was_wanted():
    assert room_for_answer(10, wanted=None, context=16) == 6
    assert room_for_answer(10, wanted=6, context=16) == 6
    for wanted, tokens in ((7, 10), (None, 16)):
        with pytest.raises(OptionError, match="the context is 16"):
            room_for_answer(tokens, wanted=wanted, context=16)


@pytest.mark.parametrize(
    ("longest", "hint"), [(None, "--context 17 or more"), (17, "--context 17 or more"), (16, "a context of 16 at most")]
)
def test_a_hint_names_a_longer_context_only_where_there_is_one(longest, hint):
    with pytest.raises(OptionError) as refused:
        room_for_answer(16, wanted=None, context=16, longest=longest)
    assert hint in refused.value.hint


# Tokenizers


def test_without_transformers_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    write_shard(tmp_path / "model.safetensors", {"a": ("F32", [1])})
    with pytest.raises(MissingPackageError, match="run needs transformers"):
        FolderTokenizer.of(open_checkpoint(tmp_path), asked_by="run")


@pytest.mark.peers
def test_a_tokenizer_or_template_that_cannot_be_used_is_told(tmp_path, transformers):
    save_model(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(OptionError, match="has no tokenizer"):
        FolderTokenizer.of(checkpoint, asked_by="run")
    save_tokenizer(tmp_path, "{{ raise_exception('no system messages') }}")
    with pytest.raises(OptionError, match=r"the chat template of .* refuses the prompt: no system messages"):
        FolderTokenizer.of(checkpoint, asked_by="run").tokens_of(Prompt(text="hello"))
    tokenizer = FolderTokenizer.of(checkpoint, asked_by="run", vocabulary=500, is_raw=True)
    with pytest.raises(OptionError, match=r"the prompt has token 510, '<\|user\|>'; the model takes 500 tokens"):
        tokenizer.tokens_of(Prompt(text="hi<|user|>"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OptionError, match="transformers cannot read the tokenizer"):
        FolderTokenizer.of(checkpoint, asked_by="run")


@pytest.mark.peers
def test_an_encoder_is_told_before_it_is_loaded(tmp_path, transformers):
    tiny_models.make(transformers, "BertForMaskedLM").save_pretrained(tmp_path)
    planned = PlannedModel.open(tmp_path, None, asked_by="run")
    with pytest.raises(OptionError, match="BertForMaskedLM generates no text"):
        planned.maker.check_generates()
