"""Tokenizer of a folder of transformers as the metadata of a GGUF file, by which llama.cpp turns text into tokens.

llama.cpp has three kinds for the families that `families.py` knows. `gpt2` is BPE over bytes: tokens, merges, and the
name of the rule that splits text beforehand. `llama` is SentencePiece's BPE: tokens and scores, of which the highest
is merged first. `t5` is SentencePiece's unigram model: tokens and scores, whose sum is to be the highest. The keys are
those of gguf-py's `constants.py`, the types of tokens those of its `TokenType`.

llama.cpp's converter finds the name of a rule by a digest of the ids of a certain text; here the rule itself, in
tokenizer.json, is compared with those of `llama-vocab.cpp`. So models whose vocabulary was extended have a name too.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from bigload.checkpoint.formats.gguf.writing import MetadataValue, numbers_of_bytes
from bigload.checkpoint.formats.sentencepiece_model import SentencePieces, parse_sentencepiece
from bigload.checkpoint.index import read_beside
from bigload.documents import MAX_CONFIG_BYTES, parse_json
from bigload.errors import InvalidCheckpointError, ReadError


class UnknownTokenizerError(Exception):
    """The tokenizer of a folder has no form in GGUF, or none was found; the text says why."""


class TokenType(IntEnum):
    """Kind of a token, by which llama.cpp treats it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED_SCORE = -1000.0
"""Of tokens that are found as a whole, before any merge."""

_SPACE = "\u2581"
"""How SentencePiece writes a space."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BREAKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_CONTRACTIONS}|{_OTHER}\p{{L}}+|\p{{N}}{{1,3}}|{_END}"
_TEKKEN = rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}|{_BREAKS}"
_GPT_4O = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_OTHER}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_BREAKS}"
)
_RULES: Mapping[tuple[str, bool], str] = {
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "smaug-bpe",
    (rf"{_CONTRACTIONS}|{_OTHER}\p{{L}}+|\p{{N}}|{_END}", False): "qwen2",
    # llama.cpp has one name for these, whose merges make every token: the result is the same
    **{(pattern, each): name for pattern, name in ((_TEKKEN, "tekken"), (_GPT_4O, "gpt-4o")) for each in (False, True)},
}
"""Names by the pattern that splits text, and whether words that are tokens are not merged."""

_LOOKS_SPECIAL = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL)
"""Control tokens that some models do not mark as such; llama.cpp's converter knows the same."""

_IDS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # as GGUF spells it
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}


@dataclass(frozen=True)
class _Folder:
    """Files of a tokenizer; empty where there are none."""

    tokenizer: Mapping[str, object]
    config: Mapping[str, object]
    template: str | None
    pieces: SentencePieces | None


@dataclass
class _Tokens:
    """Text, type and score by id."""

    texts: dict[int, str] = field(default_factory=dict)
    types: dict[int, TokenType] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)

    def add(self, number: int, text: str, kind: TokenType, score: float) -> None:
        self.texts[number], self.types[number], self.scores[number] = text, kind, score


def tokenizer_metadata(root: Path, num_rows: int) -> dict[str, MetadataValue]:
    """Return the `tokenizer.` keys for the tokenizer in the folder `root` of a model with so many embeddings.

    Raises:
        UnknownTokenizerError: there is none, or it has no form in GGUF.
        ReadError, OSError: a file cannot be read.
    """
    folder = _read(root)
    rule: dict[str, MetadataValue] = {}
    if _is_unigram(folder):
        kind, tokens = "t5", _unigram_tokens(folder)
        rule |= _unigram_rule(folder)
    elif _is_sentencepiece(folder):
        kind, tokens = "llama", _sentencepiece_tokens(folder)
        rule |= {"tokenizer.ggml.pre": "default", "tokenizer.ggml.add_space_prefix": _adds_space(folder)}
    else:
        kind, tokens = "gpt2", _byte_tokens(folder)
        rule |= {"tokenizer.ggml.pre": _rule_name(folder.tokenizer), "tokenizer.ggml.merges": _merges(folder.tokenizer)}
    last = max(tokens.texts, default=-1)
    if last < 0 or last >= num_rows:
        raise UnknownTokenizerError(f"its last token has number {last}, and the model has {num_rows} embeddings")
    numbers = range(num_rows)
    found: dict[str, MetadataValue] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [tokens.texts.get(number, f"[PAD{number}]") for number in numbers],
        "tokenizer.ggml.token_type": [tokens.types.get(number, TokenType.UNUSED).value for number in numbers],
        **rule,
        **_special_tokens(folder, tokens),
        **_templates(folder),
    }
    if kind != "gpt2":
        found["tokenizer.ggml.scores"] = [tokens.scores.get(number, _ADDED_SCORE) for number in numbers]
    _check_text(found)
    return found


def _check_text(found: Mapping[str, MetadataValue]) -> None:
    """Refuse text that is no UTF-8: JSON can hold half a character."""
    for value in found.values():
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        try:
            "".join(text for text in texts if isinstance(text, str)).encode()
        except UnicodeEncodeError as error:
            raise UnknownTokenizerError(
                f"it has text that is no UTF-8: {error.object[error.start : error.end]!r}"
            ) from None


def _read(root: Path) -> _Folder:
    tokenizer, config = (_json(root / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    stored = (
        None
        if _model(tokenizer).get("type") == "BPE" and not _has_spaces(tokenizer)
        else _content(root, "tokenizer.model") or _content(root, "spiece.model")
    )
    pieces = None
    if stored is not None:
        try:
            pieces = parse_sentencepiece(stored)
        except ValueError as error:
            if not tokenizer:
                raise UnknownTokenizerError(f"tokenizer.model is not SentencePiece's: {error}") from None
    if not tokenizer and pieces is None:
        raise UnknownTokenizerError("the folder has neither tokenizer.json nor tokenizer.model")
    template = _content(root, "chat_template.jinja")
    return _Folder(tokenizer, config, None if template is None else template.decode(errors="replace"), pieces)


def _content(root: Path, name: str) -> bytes | None:
    try:
        return read_beside(root / name, max_bytes=MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return None
    except InvalidCheckpointError as error:
        raise UnknownTokenizerError(str(error)) from None
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _json(path: Path) -> Mapping[str, object]:
    content = _content(path.parent, path.name)
    if content is None:
        return {}
    try:
        return _object(parse_json(content, object_pairs_hook=None))
    except ValueError as error:
        raise UnknownTokenizerError(f"{path.name}: {error}") from None


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, object]]:
    return [_object(each) for each in value] if isinstance(value, list) else []


def _model(tokenizer: Mapping[str, object]) -> Mapping[str, object]:
    return _object(tokenizer.get("model"))


def _steps(tokenizer: Mapping[str, object], key: str, inner: str) -> list[Mapping[str, object]]:
    """Return what a `Sequence` of tokenizer.json consists of, or the one step that stands in its place."""
    whole = _object(tokenizer.get(key))
    return _objects(whole.get(inner)) if whole.get("type") == "Sequence" else [whole] if whole else []


def _has_spaces(tokenizer: Mapping[str, object]) -> bool:
    """Return whether spaces are written as SentencePiece does, and no bytes are."""
    steps = [*_steps(tokenizer, "normalizer", "normalizers"), *_steps(tokenizer, "pre_tokenizer", "pretokenizers")]
    is_replaced = any(step.get("type") == "Replace" and step.get("content") == _SPACE for step in steps)
    return is_replaced or any(step.get("type") == "Metaspace" for step in steps)


def _is_sentencepiece(folder: _Folder) -> bool:
    if not folder.tokenizer:
        return True
    if _model(folder.tokenizer).get("type") != "BPE":
        kind = _model(folder.tokenizer).get("type")
        raise UnknownTokenizerError(f"tokenizer.json has a model of type {kind!r:.100}, expected 'BPE'")
    return _has_spaces(folder.tokenizer)


def _is_unigram(folder: _Folder) -> bool:
    if folder.pieces is not None:
        return not folder.pieces.is_bpe
    return _model(folder.tokenizer).get("type") == "Unigram"


def _unigram_tokens(folder: _Folder) -> _Tokens:
    if folder.pieces is not None:
        return _sentencepiece_tokens(folder)
    model, tokens = _model(folder.tokenizer), _Tokens()
    pieces = model.get("vocab")
    for number, piece in enumerate(pieces if isinstance(pieces, list) else []):
        if not isinstance(piece, list) or [type(each) for each in piece] not in ([str, float], [str, int]):
            raise UnknownTokenizerError(f"tokenizer.json has the piece {piece!r:.100}, expected a text and its score")
        kind = TokenType.UNKNOWN if number == model.get("unk_id") else TokenType.NORMAL
        tokens.add(number, piece[0], kind, float(piece[1]))
    _add_added(folder, tokens)
    return tokens


def _unigram_rule(folder: _Folder) -> dict[str, MetadataValue]:
    """Return how text is changed before it is cut into pieces: the table of characters, and what happens to spaces."""
    if folder.pieces is not None:
        characters, merges = folder.pieces.characters, folder.pieces.merges_spaces
    else:
        steps = _steps(folder.tokenizer, "normalizer", "normalizers")
        other = [step.get("type") for step in steps if step.get("type") not in ("Precompiled", "Replace", "Strip")]
        if other:
            raise UnknownTokenizerError(
                f"tokenizer.json normalises text by {other[0]!r:.100}, which llama.cpp does not"
            )
        tables = [step.get("precompiled_charsmap") for step in steps if step.get("type") == "Precompiled"]
        splits = _steps(folder.tokenizer, "pre_tokenizer", "pretokenizers")
        merges = any(step.get("type") == "Replace" for step in steps) or any(
            step.get("type") == "WhitespaceSplit" for step in splits
        )
        try:
            characters = b64decode(tables[0], validate=True) if tables and isinstance(tables[0], str) else b""
        except ValueError as error:
            raise UnknownTokenizerError(
                f"tokenizer.json has a precompiled_charsmap that is no base64: {error}"
            ) from None
    found: dict[str, MetadataValue] = {
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": _adds_space(folder),
        "tokenizer.ggml.remove_extra_whitespaces": merges,
    }
    if characters:
        found["tokenizer.ggml.precompiled_charsmap"] = numbers_of_bytes(characters)
    return found


def _vocabulary(tokenizer: Mapping[str, object]) -> Iterable[tuple[str, int]]:
    for text, number in _object(_model(tokenizer).get("vocab")).items():
        if not isinstance(number, int) or number < 0:
            raise UnknownTokenizerError(f"tokenizer.json gives {text!r:.100} the number {number!r:.100}")
        yield text, number


def _byte_tokens(folder: _Folder) -> _Tokens:
    tokens = _Tokens()
    for text, number in _vocabulary(folder.tokenizer):
        tokens.add(number, text, TokenType.NORMAL, 0.0)
    _add_added(folder, tokens)
    return tokens


def _sentencepiece_tokens(folder: _Folder) -> _Tokens:
    tokens = _Tokens()
    if folder.pieces is not None:
        for number, text in enumerate(folder.pieces.texts):
            tokens.add(number, text, TokenType(folder.pieces.kinds[number]), folder.pieces.scores[number])
    else:
        merges = [merge.replace(" ", "") for merge in _merges(folder.tokenizer)]
        ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        unknown = _model(folder.tokenizer).get("unk_token")
        for text, number in _vocabulary(folder.tokenizer):
            kind = TokenType.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", text) else TokenType.NORMAL
            kind = TokenType.UNKNOWN if text == unknown else kind
            tokens.add(number, text, kind, -float(ranks.get(text, len(merges))))
    _add_added(folder, tokens)
    for number, kind in tokens.types.items():
        if kind is TokenType.USER_DEFINED:  # llama.cpp finds these in the text itself
            tokens.texts[number] = tokens.texts[number].replace(_SPACE, " ")
    return tokens


def _add_added(folder: _Folder, tokens: _Tokens) -> None:
    added = _objects(folder.tokenizer.get("added_tokens")) or [
        {**_object(token), "id": int(number)}
        for number, token in _object(folder.config.get("added_tokens_decoder")).items()
        if number.isdecimal() and len(number) < 10
    ]
    for token in added:
        number, text = token.get("id"), token.get("content")
        if not isinstance(number, int) or number < 0 or not isinstance(text, str):
            raise UnknownTokenizerError(f"an added token has the number {number!r:.100} and the text {text!r:.100}")
        is_control = token.get("special") is True or _LOOKS_SPECIAL.fullmatch(text)
        kind = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        if tokens.types.get(number) is TokenType.UNKNOWN and tokens.texts[number] == text:
            kind = TokenType.UNKNOWN
        tokens.add(number, text, kind, _ADDED_SCORE)


def _merges(tokenizer: Mapping[str, object]) -> list[str]:
    """Return merges as two texts with a space between; a space within one, which tokenizers may have, as a byte."""
    merges = _model(tokenizer).get("merges")
    found = []
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise UnknownTokenizerError(f"tokenizer.json has the merge {merge!r:.100}, expected two texts")
        found.append(" ".join(part.replace(" ", "\u0120") for part in parts))
    if not found:
        raise UnknownTokenizerError("tokenizer.json has no merges")
    return found


def _rule_name(tokenizer: Mapping[str, object]) -> str:
    """Return llama.cpp's name of the rule that splits text before merges are applied."""
    other = [step.get("type") for step in _steps(tokenizer, "normalizer", "normalizers") if step.get("type") != "NFC"]
    if other:
        raise UnknownTokenizerError(f"tokenizer.json normalises text by {other[0]!r:.100}, which llama.cpp does not")
    steps = _steps(tokenizer, "pre_tokenizer", "pretokenizers")
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    if kinds[-1:] == ["ByteLevel"] and last.get("add_prefix_space") is not True:
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and last.get("use_regex", True):
            return "smollm"
        if (
            kinds == ["Split", "ByteLevel"]
            and last.get("use_regex") is False
            and steps[0].get("behavior") == "Isolated"
        ):
            pattern = _object(steps[0].get("pattern")).get("Regex")
            ignores_merges = _model(tokenizer).get("ignore_merges") is True
            if isinstance(pattern, str) and (pattern, ignores_merges) in _RULES:
                return _RULES[pattern, ignores_merges]
            raise UnknownTokenizerError(f"llama.cpp has no name for the pattern that splits text, {pattern!r:.300}")
    raise UnknownTokenizerError(f"llama.cpp has no name for a text that is split by {kinds!r:.200}")


def _adds_space(folder: _Folder) -> bool:
    if not folder.tokenizer:
        return folder.pieces is None or folder.pieces.adds_space
    if any(step.get("type") == "Prepend" for step in _steps(folder.tokenizer, "normalizer", "normalizers")):
        return True
    return any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in _steps(folder.tokenizer, "pre_tokenizer", "pretokenizers")
    )


def _special_tokens(folder: _Folder, tokens: _Tokens) -> dict[str, MetadataValue]:
    """Return the ids of tokens with a meaning, and which of them a text begins and ends with."""
    found: dict[str, MetadataValue] = {}
    numbers = {text: number for number, text in tokens.texts.items()}
    names: dict[str, str] = {}
    for key, known in _IDS.items():
        token = folder.config.get(f"{key}_token")
        text = _object(token).get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in numbers:
            names[key] = text
            found[f"tokenizer.ggml.{known}_token_id"] = numbers[text]
    single = [
        _object(_object(part).get("SpecialToken")).get("id")
        for step in _steps(folder.tokenizer, "post_processor", "processors")
        if step.get("type") == "TemplateProcessing"
        for part in _objects(step.get("single"))
    ]
    for key, at in (("bos", 0), ("eos", -1)):
        asked = folder.config.get(f"add_{key}_token")
        is_added = bool(single) and key in names and single[at] == names[key]
        if not folder.tokenizer:
            is_added = key == "bos"  # as SentencePiece's tokenizers of transformers have it
        found[f"tokenizer.ggml.add_{key}_token"] = asked if isinstance(asked, bool) else is_added
    return found


def _templates(folder: _Folder) -> dict[str, MetadataValue]:
    template = folder.template or folder.config.get("chat_template")
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = {each.get("name"): each.get("template") for each in _objects(template)}
    texts = {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
    found: dict[str, MetadataValue] = {
        "tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}": text
        for name, text in texts.items()
    }
    others = [name for name in texts if name != "default"]
    return {**found, "tokenizer.chat_templates": others} if others else found
