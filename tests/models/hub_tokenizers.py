"""Small tokenizers of the kinds that folders of the hub have, trained here, and the folders to read them from."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "the cat sat on the mat, the dog on the log. It's the 3rd time; don't you see?\n" * 4,
    "    def f(x):\n        return x  # the end\n" * 3,
    "café naïve 日本語 日本 \U0001f600 the end\n" * 4,
]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and SmolLM2: bytes and their concatenations, no normalizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(special("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.add_tokens([AddedToken("        ", normalized=False), AddedToken("｜é｜", normalized=False)])
    begin = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
    template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer


def sentencepiece(*, prepend: str) -> Tokenizer:
    """As Llama 2 (prepend "all"), Mistral ("first") and Gemma ("none"): spaces are a mark, unknown characters bytes."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False, limit_alphabet=40)
    learned.train_from_iterator(TEXT, trainer)
    described = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *BYTES]
    names += sorted(set(described["vocab"]) - {"é"}, key=described["vocab"].get)
    merges = [tuple(pair) for pair in described["merges"] if "é" not in "".join(pair)]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(special("<unk>", "<s>", "</s>", "<end_of_turn>"))
    space = normalizers.Replace(" ", "▁")
    if prepend == "all":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    elif prepend == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = space
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepend != "none":
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: likely pieces of words, and </s> after every text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=names, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: lower-case words cut in pieces."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def words() -> Tokenizer:
    """Whole words, without a decoder."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(TEXT, trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False))
    return tokenizer


MAKERS = {
    "byte-level": (byte_level, {"bos_token": "<|begin|>", "eos_token": "<|end|>"}),
    "llama2": (lambda: sentencepiece(prepend="all"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "mistral": (lambda: sentencepiece(prepend="first"), {"bos_token": "<s>", "eos_token": "</s>"}),
    "gemma": (lambda: sentencepiece(prepend="none"), {"bos_token": "<s>", "eos_token": "<end_of_turn>"}),
    "t5": (unigram, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}),
    "bert": (word_piece, {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}),
    "words": (words, {"unk_token": "[UNK]"}),
}


def write_folder(folder: Path, kind: str, **config: object) -> Path:
    """A folder with the tokenizer of that kind; ``config`` goes into its tokenizer_config.json."""
    make, names = MAKERS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(make().to_str(), encoding="utf-8")
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
