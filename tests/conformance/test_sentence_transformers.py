"""Folders of sentence-transformers keep their form: the library finds what a reshard wrote."""

import pytest

import bigload

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
modules = pytest.importorskip("sentence_transformers.models")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("sentences")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["the", "sky", "is", "blue", "because", "light", "scattered"],
    ]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(root / "bert")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes))
    model.save_pretrained(root / "bert")
    transformer = modules.Transformer(str(root / "bert"))
    parts = [transformer, modules.Pooling(32), modules.Dense(32, 16), modules.Dense(16, 8)]
    library.SentenceTransformer(modules=parts, device="cpu").save(str(root / "model"))
    return root / "model"


def test_tensors_are_those_of_all_modules(folder):
    model = library.SentenceTransformer(str(folder), device="cpu")
    stored = bigload.open_checkpoint(folder)
    assert stored.total_bytes == sum(each.nbytes for each in model.state_dict().values() if each.is_floating_point())
    assert [name for name in stored.tensors if "Dense" in name] == [
        f"{number}_Dense.linear.{leaf}" for number in (2, 3) for leaf in ("bias", "weight")
    ]


@pytest.mark.parametrize("size", [None, 20_000])
def test_a_resharded_folder_gives_the_same_sentences(folder, tmp_path, size):
    bigload.reshard(folder, tmp_path / "out", layout="shards", max_shard_bytes=size)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > (1 if size else -1)
    found, expected = (
        library.SentenceTransformer(str(each), device="cpu").encode(["the sky is blue", "light"])
        for each in (tmp_path / "out", folder)
    )
    assert found.shape == (2, 8)
    assert (found == expected).all()
